"""``statemgr``: finds commands, loads the one that is called, and turns errors into one line and an exit status.

The table here has the commands that are no operations; each operation names its own. Other packages add theirs as entry
points of the group ``statemgr.commands``.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any

import click

from statemgr import __version__
from statemgr.errors import PrerequisiteMissing, StatemgrError
from statemgr.operations import commands
from statemgr.terminal.output import describe, show_error

#: Name → (module and attribute, short help). With the help here, ``--help`` does not have to load every command.
_OWN = {
    "bench": (
        "statemgr_tools.commands.bench:command",
        "Measure commits, restores and calls, and compare them with references.",
    ),
    "config": ("statemgr.cli.config:command", "Show or check the configuration."),
    "demo": ("statemgr_tools.commands.demo:demo", "Run a real PySpark pipeline, kill it, restore it, recount it."),
    "dev": (
        "statemgr_tools.commands.dev:command",
        "Start and stop a local Kafka broker and S3 server, without Docker.",
    ),
    "explain": ("statemgr.cli.explain:command", "Explain an error, a fault of a job or a key, or print a page."),
    "init": ("statemgr.cli.config:init_command", "Write a commented configuration file, or an example that runs."),
    "plan-capacity": (
        "statemgr_tools.commands.plan_capacity:command",
        "Estimate requests, bytes, cost and restore times of a planned job.",
    ),
    "restore": ("statemgr.cli.restore:command", "Restore committed state into a directory."),
    "store": ("statemgr.cli.store:command", "Read keys from the committed state of a store."),
    "ui": ("statemgr_tools.commands.ui:command", "Serve a read-only web page about jobs."),
}
#: The extra that a command needs, if it is not `spark`.
_EXTRAS = {"demo": "demo"}
_INTERRUPTED = 130
#: Of a few digits, perhaps with a unit, which no password is.
_NUMBER = re.compile(r"[+-]?[0-9]{1,7}(\.[0-9]{1,7})?([kKMGTPE]?(i?B)?|ms|s|min|h)")


@cache
def _built_in() -> dict[str, tuple[str, str]]:
    return _OWN | commands()


class _Notices(logging.Handler):
    """Prints what the loading of the configuration logs, and what a command waits for or leaves out, one line
    each."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"note: {record.getMessage()}", err=True)


_NOTICES = _Notices()


class CommandLine(click.Group):
    """The top group. It loads commands only when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_built_in(), *_others()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command. If its extra is missing, the result is a command that says so."""
        target = _built_in()[cmd_name][0] if cmd_name in _built_in() else _others().get(cmd_name)
        if target is None:
            return None
        module, _, attribute = target.partition(":")
        if cmd_name not in _built_in():
            return _plugged_in(cmd_name, target)
        try:
            loaded: click.Command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            missing = error.name or module
            if missing.startswith("statemgr."):
                raise
            return _not_installed(cmd_name, missing)
        return loaded

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Also suggest the nearest command for an unknown one."""
        if args and not args[0].startswith("-") and args[0] not in _built_in() and args[0] not in _others():
            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            ctx.fail(f"no command is called {args[0]!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without loading statemgr's own."""
        rows = []
        for name in self.list_commands(ctx):
            if name in _built_in():
                rows.append((name, _built_in()[name][1]))
                continue
            try:
                loaded = self.get_command(ctx, name)
                rows.append((name, loaded.get_short_help_str() if loaded else ""))
            except StatemgrError as error:
                rows.append((name, error.message))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> None:
        """Run a command, and exit with its status."""
        extra.pop("standalone_mode", None)
        with suppress(AttributeError):  # there is none, or it is no file
            # half a surrogate pair, of a value or of a path that is not UTF-8: shown as JSON escapes it
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        arguments = _config_last(list(sys.argv[1:] if args is None else args))
        sys.exit(self._status(arguments, prog_name or "statemgr", extra))

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        """Also print the help."""
        with _for_a_reader():
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _for_a_reader():
            return super().invoke(ctx)

    def _status(self, arguments: list[str], prog_name: str, extra: dict[str, Any]) -> int:
        try:
            result = super().main(arguments, prog_name, standalone_mode=False, **extra)
            return result if isinstance(result, int) else 0
        except click.ClickException as error:
            files = _configurations(error, arguments)
            near = [*(getattr(error, "possibilities", None) or ()), *_choices(error), *files]
            named = f". Name the configuration file with --config {files[0]}" if files else ""
            error.message = _without_values(error.message, arguments, near) + named  # type: ignore[misc]
            error.show()
            return error.exit_code
        except (click.Abort, SystemError) as error:
            # the Kafka client turns an interrupt within its code into a SystemError
            if isinstance(error, SystemError) and not isinstance(error.__cause__, KeyboardInterrupt):
                raise
            show_error("interrupted")
            return _INTERRUPTED
        except (StatemgrError, OSError) as error:
            from statemgr.cli.explain import see  # only now: it loads what no command needs

            _debug(arguments)
            typed = error if isinstance(error, StatemgrError) else _typed(error)
            show_error(describe(typed), typed.hint, see(typed))
            return typed.exit_status


@contextmanager
def _for_a_reader() -> Iterator[None]:
    """If the reader of a pipe has ended (`| head`), nothing is wrong, and nothing more can be written: end with 0.
    Click and rich would end with 1."""
    try:
        yield
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        raise click.exceptions.Exit(0) from None
    except BrokenPipeError:
        look = select.poll()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # there is none, or it is no file, or closed
                look.register(stream.fileno(), 0)
        ended = look.poll(0)
        if not ended:
            raise  # another pipe is broken
        for descriptor, _ in ended:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        raise click.exceptions.Exit(0) from None


def _config_last(arguments: list[str]) -> list[str]:
    """The arguments with a configuration file that is named before the command moved to where the command takes it."""
    at = 0
    while at < len(arguments) and arguments[at] == "--debug":
        at += 1
    name, equals, value = arguments[at].partition("=") if at < len(arguments) else ("", "", "")
    if name.startswith("-c"):  # click takes `-c FILE` and `-cFILE`
        name, equals, value = "-c", arguments[at][2:], arguments[at][2:]
    size = 1 if equals else 2
    if name not in ("-c", "--config") or len(arguments) <= at + size:
        return arguments
    rest = arguments[:at] + arguments[at + size :]
    if any(one in ("-c", "--config") or one.startswith("--config=") for one in rest):
        return arguments  # the option of the command counts
    if not _takes_config(rest[at:]):
        return rest
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], "--config", value if equals else arguments[at + 1], *rest[end:]]


def _configurations(error: click.ClickException, arguments: Sequence[str]) -> list[str]:
    """The files among the arguments that a command does not take, if it has the option ``--config``."""
    context = getattr(error, "ctx", None)
    if type(error) is not click.UsageError or context is None:
        return []
    if not any(option.name == "config_file" for option in context.command.params):
        return []
    return [one for one in arguments if one in error.message and (one.endswith(".toml") or os.path.isfile(one))]


def _takes_config(words: Sequence[str]) -> bool:
    """Whether a command has the option for a configuration file. One that is not found, or another package's, may."""
    command: click.Command = cli
    for word in words:
        if not isinstance(command, click.Group):
            break
        if word.startswith("-"):
            continue
        is_known = command is not cli or word in _built_in()
        found = command.get_command(click.Context(command), word) if is_known else None
        if found is None:
            return True
        command = found
    return any("--config" in option.opts for option in command.params)


def _choices(error: click.ClickException) -> Iterator[str]:
    """The words that the options of the command may have as values."""
    context = getattr(error, "ctx", None)
    for option in context.command.params if context is not None else ():
        yield from getattr(option.type, "choices", ())


def _without_values(message: str, arguments: Sequence[str], near: Iterable[str]) -> str:
    """A message of click's without the values from the command line: a mistyped option may show a password.

    Names of options, numbers, and words that are nearly a command, or nearly one of ``near``, stay.
    """
    from statemgr.config.loading import MASK  # `--help` needs no configuration

    known = {*_built_in(), *_others(), *near}
    for argument in sorted(set(arguments), key=len, reverse=True):
        value = argument.partition("=")[2]
        given = [value] if argument.startswith("-") else [argument, value]
        if get_close_matches(argument, known, n=1):
            continue
        for text in given:
            if not text or _NUMBER.fullmatch(text):
                continue
            message = re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", lambda _: MASK, message)
            message = message.replace(repr(text), repr(MASK))
    return message


def _typed(error: OSError) -> StatemgrError:
    """An error that a command did not expect, such as one of standard output."""
    from statemgr.os_errors import MISTYPED, Fault, translate

    hints = {**dict.fromkeys(MISTYPED, "name another path"), Fault.FAILED: "`--debug` shows where it happened"}
    return translate(error, "the command cannot go on", error.filename, kinds=MISTYPED, hints=hints)


def _debug(arguments: Sequence[str]) -> None:
    if "--debug" in arguments:
        traceback.print_exc()


@cache
def _others() -> dict[str, str]:
    """The commands of other packages: name → target. Reads the metadata of every installed package: not for nothing."""
    from importlib.metadata import entry_points

    return {entry.name: entry.value for entry in entry_points(group="statemgr.commands")}


def _plugged_in(name: str, target: str) -> click.Command:
    """The command of another package. Raises: ConfigError if it cannot be loaded, or is none."""
    from statemgr.config.factories import plugged  # `--help` alone needs no configuration

    module, _, attribute = target.partition(":")
    try:
        what = f"the command {name!r} ({target})"
        loaded: click.Command = plugged(what, lambda: getattr(import_module(module), attribute), click.Command)
        return loaded
    except PrerequisiteMissing as missing:
        return _not_installed(name, str(missing.where["module"]))


def _not_installed(name: str, module: str) -> click.Command:
    extra = _EXTRAS.get(name, "spark")

    def refuse(**_: object) -> None:
        raise PrerequisiteMissing(
            f"statemgr {name} needs {module}, which is not installed",
            hint=f"install it: pip install 'statemgr[{extra}]'",
        )

    return click.Command(
        name,
        callback=refuse,
        help=f"Needs: pip install 'statemgr[{extra}]'.",
        add_help_option=False,
        params=[click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
    )


@click.command(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="statemgr")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option(
    "--config", "-c", type=click.Path(), expose_value=False, help="Configuration file, for commands that read one."
)
def cli(debug: bool) -> None:
    """Keyed state of stream jobs, restored in bulk from a blob store. Kafka says which state is current.

    \b
    Exit status: 0 done · 1 a check found something wrong · 2 wrong use or configuration
                 3 a part could not be reached · 4 state missing or corrupt
    """
    if debug:
        from statemgr.logs.formats import TextFormat  # `--help` does not need it

        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(TextFormat())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
    else:
        # messages of the client libraries would bury the one line that says what is wrong
        logging.getLogger("statemgr").addHandler(logging.NullHandler())
        logging.getLogger("statemgr.config").addHandler(_NOTICES)
        # they say what a command waits for, and what it does not look at
        for name in ("kafka.metadata", "kafka.reader", "operations.rescale.rescale"):
            told = logging.getLogger(f"statemgr.{name}")
            told.addHandler(_NOTICES)
            told.setLevel(logging.INFO)


def main() -> None:
    """Run the console script."""
    cli.main()
