"""The pages of the reference, made from the code: public names, commands, metrics, messages of errors."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import click

from statemgr import errors
from statemgr.cli.main import _built_in, cli
from statemgr.telemetry.metric_declarations import declared

ROOT = Path(__file__).parents[2]
#: Modules whose ``__all__`` is public → what they are for.
PUBLIC = {
    "statemgr": "Consumer loops, reading published state, configuration and serdes.",
    "statemgr.engine": "For an engine that commits many tasks at once, on many machines.",
    "statemgr.testing": "Tests of jobs in memory.",
    "spark_integration": "Stateful queries on Spark Structured Streaming.",
}
_SOURCES = ("statemgr", "spark_integration", "statemgr_tools")
_PLACEHOLDER = "…"


def names() -> list[str]:
    """The names of the pages."""
    modules = [*PUBLIC, "statemgr.errors"]
    return [f"reference/{name}.md" for name in [*modules, "cli", "metrics", "messages"]]


def pages(repository: str) -> dict[str, str]:
    """Name of a page → its Markdown. ``repository`` is the URL of the source."""
    texts = [*map(api_page, PUBLIC), errors_page(), cli_page(), metrics_page(), messages_page(repository)]
    return dict(zip(names(), texts, strict=True))


def errors_page() -> str:
    """The module of the errors: its docstring has the tree."""
    options = "    options:\n      show_root_heading: false\n      heading_level: 2\n"
    text = "[Errors](../errors.md) says what to do about each."
    return f"# statemgr.errors\n\n{text}\n\n::: statemgr.errors\n{options}"


def api_page(module: str) -> str:
    """The public names of a module."""
    names = import_module(module).__all__
    parts = [f"# {module}", PUBLIC[module], "\n".join(f"- [`{name}`][{module}.{name}]" for name in names)]
    parts += [f"::: {module}.{name}" for name in names]
    return "\n\n".join(parts) + "\n"


def cli_page() -> str:
    """Every command with its arguments and options."""
    parts = [
        "# Command line",
        "Every command, as `--help` prints it. [Operations](../operations.md) says when to use which. The exit "
        "statuses are in its [first table](../operations.md).",
    ]
    context = click.Context(cli, info_name="statemgr")
    for name in sorted(_built_in()):
        command = cli.get_command(context, name)
        assert command is not None
        parts += _command(command, click.Context(command, info_name=name, parent=context), 2)
    return "\n\n".join(parts) + "\n"


def _command(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    yield f"{'#' * level} {context.command_path}"
    yield f"```\n{' '.join([context.command_path, *command.collect_usage_pieces(context)])}\n```"
    yield _text(inspect.cleandoc(command.help or ""))
    rows = [r for r in (p.get_help_record(context) for p in command.get_params(context)) if r is not None]
    options = [f"| `{_cell(names)}` | {_cell(_markup(text))} |" for names, text in rows]
    if options:
        yield "\n".join(["| option | meaning |", "|---|---|", *options])
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            if not inner.hidden:
                yield from _command(inner, click.Context(inner, info_name=name, parent=context), level + 1)


def _text(help_text: str) -> str:
    """Paragraphs of a help text; those that click leaves as they are become code."""
    paragraphs = re.split(r"\n\s*\n", help_text.replace("\f", "").strip())
    return "\n\n".join(
        "```\n" + part.lstrip("\b").strip("\n") + "\n```" if part.startswith("\b") else _markup(part)
        for part in paragraphs
    )


def _markup(text: str) -> str:
    """A text in which only its own code is markup."""
    parts = text.split("`")
    return "`".join(part if number % 2 else re.sub(r"([<>*_\[\]])", r"\\\1", part) for number, part in enumerate(parts))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def metrics_page() -> str:
    """Every metric with its kind and its labels."""
    lines = [
        f"| `{one.shown}` | {one.kind} | {', '.join(['job', *one.labels])} | {_cell(one.text)} |"
        for one in sorted(declared(), key=lambda one: one.shown)
    ]
    return "\n".join(
        [
            "# Metrics",
            "",
            "The metrics that a process with `metrics.port` serves. [Monitoring](../monitoring.md#metrics) says which",
            "to watch.",
            "",
            "| metric | kind | labels | meaning |",
            "|---|---|---|---|",
            *lines,
            "",
        ]
    )


def messages_page(repository: str, packages: Sequence[str] = _SOURCES) -> str:
    """Every message of an error in the source, by its kind, with its hint."""
    kinds: dict[str, list[tuple[str, str, str]]] = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            for kind, message, hint, line in _raised(path):
                place = f"{path.relative_to(ROOT).as_posix()}#L{line}"
                kinds.setdefault(kind, []).append((message, hint, f"{repository.rstrip('/')}/blob/main/{place}"))
    parts = [
        "# Messages",
        f"The messages that the source has for each kind of error, with their hints. `{_PLACEHOLDER}` stands for what "
        "only the running program knows. [Errors](../errors.md) says what to do about each kind.",
    ]
    for kind in sorted(kinds):
        rows = [f"| [{_cell(_markup(m))}]({url}) | {_cell(_markup(h))} |" for m, h, url in sorted(kinds[kind])]
        parts += [f"## {kind}", "\n".join(["| message | hint |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def _raised(path: Path) -> Iterator[tuple[str, str, str, int]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args and _is_kind(node.func.id):
            hints = [k.value for k in node.keywords if k.arg == "hint"]
            message = _rendered(node.args[0], texts)
            if message != _PLACEHOLDER:
                yield node.func.id, message, _rendered(hints[0], texts) if hints else "", node.lineno


def _is_kind(name: str) -> bool:
    kind = getattr(errors, name, None)
    return isinstance(kind, type) and issubclass(kind, errors.StatemgrError)


def _rendered(node: ast.expr, texts: dict[str, ast.expr]) -> str:
    """A text with a placeholder for everything that is not written in the source."""
    if isinstance(node, ast.Constant):
        return str(node.value) if node.value is not None else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_rendered(part, texts) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _rendered(node.left, texts) + _rendered(node.right, texts)
    if isinstance(node, ast.Name) and node.id in texts:
        return _rendered(texts[node.id], {})
    return _PLACEHOLDER
