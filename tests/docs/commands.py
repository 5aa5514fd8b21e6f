"""Checks that the commands, options, targets, modules, extras and files in lines of shell exist."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise, takewhile
from pathlib import Path

import click

from statemgr.cli.main import cli
from tests.docs.blocks import PAGES, ROOT

_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
#: A placeholder that the reader replaces → a valid value.
_ID = "1700000000000-123456"
_PLACEHOLDERS = {"ID": _ID, "BEFORE": _ID, "AFTER": _ID, "M": "2", "N": "1", "COMMAND": "top"}
_OPERATORS = {"&&", "||", ";", "|", "&"}
#: Programs of the machine. Their arguments are not checked.
_OTHERS = {
    ".", "cd", "curl", "export", "git", "grep", "jq", "kcat", "kill", "mkdir", "rm", "sleep", "spark-submit", "tail",
    "venv-pack",
}  # fmt: skip


def commands(text: str) -> Iterator[list[str]]:
    """Return the words of each command in a script or a session, without comments, operators and assignments."""
    if text.startswith("$ "):
        text = "\n".join(line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ "))
    for line in text.replace("\\\n", " ").replace("2>&1", "").splitlines():
        words: list[str] = []
        for word in [*_words(line), ";"]:
            if word not in _OPERATORS:
                words.append(word)
                continue
            while words and _ASSIGNMENT.fullmatch(words[0]):
                words.pop(0)
            if words:
                yield words
            words = []


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    return list(lexer)


def problem(words: list[str], *, whole: bool = True) -> str | None:
    """Return the problem of a command, or None. Unless it is ``whole`` and has no …, arguments may be missing."""
    whole = whole and "…" not in words
    words = list(takewhile(lambda word: ">" not in word, words))  # without redirections
    name, *words = (_PLACEHOLDERS.get(word, word) for word in words if word != "…")
    if name in _OTHERS:
        return None
    if name.startswith(".venv/bin/"):
        exists = (Path(sys.executable).parent / Path(name).name).exists()
        return None if exists else f"the virtual environment has no {Path(name).name}"
    if "/bin/" in name:  # of an environment that the page makes
        return problem([Path(name).name, *words], whole=whole)
    if name not in _PROGRAMS:
        return f"no test checks the program {name!r}: add it to tests/docs/commands.py"
    return _PROGRAMS[name](words, whole)


def _statemgr(words: list[str], whole: bool) -> str | None:
    command: click.Command = cli
    context: click.Context | None = None
    name: str | None = "statemgr"
    try:
        while isinstance(command, click.Group):
            context = command.make_context(name, words, parent=context)
            left = [*context._protected_args, *context.args]
            if not left:
                return None if not whole else f"statemgr {name}: a command is missing"
            name, found, words = command.resolve_command(context, left)
            assert found is not None
            command = found
        command.make_context(name, words, parent=context)
    except click.exceptions.Exit:
        return None  # --help and --version
    except (click.MissingParameter, click.exceptions.NoArgsIsHelpError) as error:
        return error.format_message() if whole else None
    except click.UsageError as error:
        named = not whole and "requires an argument" in error.message  # a sentence names an option without its argument
        return None if named else error.format_message()
    return None


@cache
def _makefile() -> str:
    return (ROOT / "Makefile").read_text(encoding="utf-8")


def _make(words: list[str], whole: bool) -> str | None:
    targets = set(re.findall(r"^([a-z-]+):", _makefile(), re.MULTILINE))
    for word in words:
        variable = re.match(r"([A-Z_]+)=", word)
        if variable and not re.search(rf"\$\({variable[1]}\)|[(,]{variable[1]}\b|^{variable[1]} ", _makefile(), re.M):
            return f"the Makefile has no variable {variable[1]}"
        if not variable and word not in targets:
            return f"the Makefile has no target {word!r}"
    return None


def _python(words: list[str], whole: bool) -> str | None:
    if words[:1] == ["-m"]:
        return None if find_spec(words[1]) else f"there is no module {words[1]}"
    return _files(words[:1])


def _files(words: list[str]) -> str | None:
    """Check that a script is in the repository, in the example of ``init``, or on a page that says to write it."""
    for word in words:
        places = (ROOT, ROOT / "statemgr" / "cli" / "example")
        on_a_page = any(re.search(rf"(?:[Ww]rite|And) `{re.escape(word)}`", page.read_text("utf-8")) for page in PAGES)
        if not on_a_page and not any((place / word).exists() for place in places):
            return f"there is no file {word}"
    return None


def _pip(words: list[str], whole: bool) -> str | None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    wanted = {extra for extras in re.findall(r"\[([\w,-]+)\]", " ".join(words)) for extra in extras.split(",")}
    return f"there are no extras {sorted(wanted - set(known))}" if wanted - set(known) else None


def _pytest(words: list[str], whole: bool) -> str | None:
    return _files([word.partition("::")[0] for word in words if "/" in word])


def _docker(words: list[str], whole: bool) -> str | None:
    if words[:1] == ["build"]:
        return _given_files(words)
    composed = words[:1] == ["compose"] and (ROOT / "docker-compose.yml").exists()
    return None if composed else "only `docker build` and `docker compose` are known"


def _kubectl(words: list[str], whole: bool) -> str | None:
    return _given_files(words)


def _given_files(words: list[str]) -> str | None:
    """Check the files after ``-f``."""
    return _files([file for option, file in pairwise(words) if option == "-f"])


_PROGRAMS: dict[str, Callable[[list[str], bool], str | None]] = {
    "statemgr": _statemgr,
    "make": _make,
    "python": _python,
    "python3": _python,
    "pip": _pip,
    "pytest": _pytest,
    "docker": _docker,
    "kubectl": _kubectl,
}
#: The programs that the tests check, in blocks and in sentences.
CHECKED = tuple(_PROGRAMS)
