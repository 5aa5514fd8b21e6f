"""Hints: every command, option, keyword, configuration key and page in a hint exists.

The test collects the hints from the source: arguments called ``hint``, ``fix`` or ``fix_command``, and those of
``TopicProblem``. It follows names to the texts assigned to them. ``…`` stands for a value that only the running program
knows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

import click
import pytest

from statemgr.cli.explain import pages
from statemgr.cli.main import cli
from statemgr.config.keys import KEYS, find
from statemgr.model.jobs.permissions import PERMISSIONS

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "statemgr").rglob("*.py"), *(ROOT / "spark_integration").rglob("*.py")])
_KEYWORDS = {"hint", "fix", "fix_command"}
_UNKNOWN = "…"
#: Expressions that pass on a hint from another place, where the test collects it.
_PASSED_ON = re.compile(
    r"(self\.)?\w+\.(hint|fix|fix_command)|error\.hint( or '')?|hint|fix|data\['hint'\]|lines\[-1\].*"
)
#: Words after "statemgr" in a sentence that is not a command.
_PROSE = {"again", "may", "where"}
#: Options that nearly every command has.
_COMMON = {"--config", "--set"}
#: Words that promise a command → the command that must exist.
_PROMISES = {
    r"\broll(ed|ing)? back": "checkpoints rollback",
    r"\badopt": "adopt",
    r"\brescale": "rescale",
    r"\bmigrat": "migrate",
}
_OTHER_PROGRAM = re.compile(r"\b(?:kafka-[a-z-]+\.sh|pip|apt|brew|docker|java) .*")
_KEY = re.compile(r"(?<![\w./-])(?:job|task|stores|blob\.store|kafka|state|metrics)\.[\w<>…*-]+(?:\.[\w<>…*-]+)*")


@dataclass(frozen=True)
class Hint:
    """One possible text of a hint, and where it is written."""

    place: str
    text: str

    @property
    def of_command(self) -> bool:
        """Whether a command line prints it."""
        path = self.place.partition(":")[0]
        return path.startswith(("statemgr/cli/", "statemgr_tools/commands/demo.py")) or _is_of_command(path)


@cache
def _is_of_command(path: str) -> bool:
    """Whether a file of an operation, or of what commands share, is one of the command line."""
    if path.startswith(("statemgr/operations/", "statemgr/health/")):
        return re.search(r"^\s*from statemgr\.terminal\b", (ROOT / path).read_text(), re.MULTILINE) is not None
    return path.startswith("statemgr/terminal/")


@dataclass
class Module:
    """The assignments, functions and calls of a module, by name."""

    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    imported: dict[str, Path] = field(default_factory=dict)
    parameters: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    calls: dict[str, list[ast.Call]] = field(default_factory=dict)

    @classmethod
    @cache
    def of(cls, path: Path) -> Module:
        """Read a file."""
        module = cls()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    module._assign(target, node.value)
            elif (isinstance(node, ast.AnnAssign) and node.value is not None) or isinstance(node, ast.AugAssign):
                module._assign(node.target, node.value)
            elif isinstance(node, ast.FunctionDef):
                for place, argument in enumerate(node.args.args):
                    module.parameters.setdefault(argument.arg, []).append((node.name, place))
            elif isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                module.calls.setdefault(name, []).append(node)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("statemgr", "spark_integration")):
                source = ROOT / f"{str(node.module).replace('.', '/')}.py"
                module.imported.update({alias.name: source for alias in node.names if source.exists()})
        return module

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._assign(one, its)

    def texts(self, node: ast.expr, following: frozenset[str] = frozenset()) -> list[str]:
        """Return every text that an expression can be, with placeholders."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            parts = [
                self.texts(part.value, following) if isinstance(part, ast.FormattedValue) else self.texts(part)
                for part in node.values
            ]
            return ["".join(chosen) for chosen in product(*(part or [_UNKNOWN] for part in parts))]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            both = product(self.texts(node.left, following), self.texts(node.right, following))
            return ["".join(chosen) for chosen in both]
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body, following), *self.texts(node.orelse, following)]
        if isinstance(node, ast.BoolOp):
            return [text for value in node.values for text in self.texts(value, following)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "capitalize":
            return self.texts(node.func.value, following)
        if isinstance(node, ast.Name) and node.id not in following:
            return self._named(node.id, following | {node.id})
        return [_UNKNOWN]

    def _named(self, name: str, following: frozenset[str]) -> list[str]:
        values = list(self.assigned.get(name, []))
        for function, place in self.parameters.get(name, []):
            for call in self.calls.get(function, []):
                values += [keyword.value for keyword in call.keywords if keyword.arg == name]
                values += call.args[place : place + 1]
        found = [text for value in values for text in self.texts(value, following)]
        if not found and name in self.imported:
            found = Module.of(self.imported[name])._named(name, frozenset())
        return found or [_UNKNOWN]


def hints_of(path: Path) -> Iterator[Hint]:
    """Yield the hints of one file. A hint with no readable text fails the test."""
    tree = ast.parse(path.read_text())
    module = Module.of(path)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        values = [keyword.value for keyword in node.keywords if keyword.arg in _KEYWORDS]
        if isinstance(node.func, ast.Name) and node.func.id == "TopicProblem":
            values += node.args[2:3]
        for value in values:
            place = f"{path.relative_to(ROOT)}:{value.lineno}"
            texts = module.texts(value)
            readable = [text for text in texts if text.replace(_UNKNOWN, "").strip()]
            assert readable or not texts or _PASSED_ON.fullmatch(ast.unparse(value)), f"{place}: it cannot be read"
            yield from (Hint(place, text) for text in readable)


@cache
def hints() -> tuple[Hint, ...]:
    """Return all hints."""
    found = tuple(dict.fromkeys(hint for path in SOURCES for hint in hints_of(path)))
    assert len(found) > 200
    return found


@cache
def commands() -> dict[str, click.Command]:
    """Return every command and group by its name, such as ``topics create``."""
    context = click.Context(cli)
    found: dict[str, click.Command] = {}

    def add(prefix: str, command: click.Command) -> None:
        found[prefix] = command
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                assert below is not None
                add(f"{prefix} {name}".strip(), below)

    add("", cli)
    return found


def options(command: click.Command) -> set[str]:
    """Return the options of a command."""
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts) if name.startswith("--")}


def _every_option() -> set[str]:
    return {option for command in commands().values() for option in options(command)}


def problems(text: str, *, from_a_command: bool = False) -> Iterator[str]:
    """Yield what a hint names that does not exist. A command's own hint may name its options without the command."""
    for quoted in re.findall(r"`(statemgr[^`]*)`", text):
        yield from _problems_of_command(quoted)
    rest = _OTHER_PROGRAM.sub("", re.sub(r"`[^`]*`", "", text))
    for following in re.findall(r"(?<!')\bstatemgr ([a-z-]+)", rest):
        if following not in _PROSE:
            yield f"write the command in backticks: statemgr {following}"
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest):
        if option not in _every_option():
            yield f"no command has {option}"
        elif option not in _COMMON and not from_a_command:
            yield f"name the command that has {option}"
    yield from _problems_of_names(text)
    for promise, command in _PROMISES.items():
        if re.search(promise, text, re.IGNORECASE) and command not in commands():
            yield f"there is no `statemgr {command}`"


def _problems_of_command(quoted: str) -> Iterator[str]:
    words = quoted.split()[1:]
    path: list[str] = []
    while words and not words[0].startswith("-") and isinstance(commands()[" ".join(path)], click.Group):
        path.append(words.pop(0))
        if " ".join(path) not in commands():
            yield f"there is no `statemgr {' '.join(path)}`"
            return
    has = options(commands()[" ".join(path)])
    for word in words:
        if word.startswith("--") and word not in has:
            yield f"`statemgr {' '.join(path)}` has no {word}"


def _problems_of_names(text: str) -> Iterator[str]:
    for keyword in re.findall(r"\b([a-z_]+)=True\b", text):
        if keyword not in PERMISSIONS:
            yield f"there is no permission {keyword}"
    for key in _KEY.findall(text):
        if not _is_key(key.rstrip(".")):
            yield f"{key} is no configuration key"


def _is_key(key: str) -> bool:
    """Whether this is a key, a pattern of the table, or the beginning of one (``kafka.sasl.*``)."""
    name = key.replace("<name>", "name").replace(_UNKNOWN, "name")
    if name.endswith(".*"):
        start = name.removesuffix("*")
        return bool(find(f"{start}x")) or any(k.pattern.replace("<name>", "name").startswith(start) for k in KEYS)
    return find(name) is not None


def test_every_hint_names_only_what_exists() -> None:
    """The test checks commands, their options, permissions, configuration keys and promised commands."""
    wrong = [
        f"{hint.place}: {problem} in {hint.text!r}"
        for hint in hints()
        for problem in problems(hint.text, from_a_command=hint.of_command)
    ]
    assert wrong == []


def test_a_page_that_a_text_names_comes_with_the_package() -> None:
    """Messages, hints and help texts name docs/X.md only if there is that page. The wheel has all of them."""
    texts = {command.help or "" for command in commands().values()}
    for path in SOURCES:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
        texts |= {constant.value for constant in constants if isinstance(constant.value, str)}
    named = {name for text in texts for name in re.findall(r"\bdocs/[a-z-]+\.md", text)}
    assert "docs/security.md" in named
    assert named <= {f"docs/{name}.md" for name in pages()}


@pytest.mark.parametrize(
    "text",
    [
        "`statemgr topics fix`",
        "`statemgr gc --force`",
        "run statemgr checkpoints list",
        "open it with --allow-anything",
        "open it with --allow-empty-start",
        "open once with allow_anything=True",
        "set task.checkpoint.topics",
        "raise stores.…x.rocksdb.everything",
        "rescale the job with `statemgr rescale --force`",
    ],
)
def test_a_hint_that_names_what_is_not_there_is_found(text: str) -> None:
    """The test above notices each kind of wrong name."""
    assert list(problems(text)) != []


@pytest.mark.parametrize(
    "text",
    [
        "`statemgr topics create` makes it",
        "`statemgr gc --write`",
        "`statemgr init --force` overwrites it",
        "--config names another",
        "allow_new_stores=True",
        "set stores.<name>.key.serde, kafka.sasl.* or stores.….backup.factories",
        "kafka-topics.sh --bootstrap-server x --alter",
        "pip install 'statemgr[spark]'",
        "install statemgr again",
    ],
)
def test_a_hint_that_is_right_passes(text: str) -> None:
    """A hint that names only what exists passes."""
    assert list(problems(text)) == []
