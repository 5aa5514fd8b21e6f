"""Run a new user's first commands from the README and docs/quickstart.md in a shell, in their order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import blocks

_DEADLINE_S = 600.0
_END = "end of the command"
#: Read-only commands. The test repeats them until they print what the page shows.
_LOOKS = ("cat ", "grep ", "tail ", "statemgr checkpoints ", "statemgr snapshots ", "statemgr store ", "statemgr top ")
#: What has been done for the tests already.
_INSTALLS = ("pip ", "python3 -m venv ")
#: Commands whose output is the same in every run.
_EXACT = ("python send.py", "statemgr config check", "statemgr init", "statemgr store scan")
#: Parts that differ between runs, and what replaces them in a comparison.
_DIFFERENT = {
    r"\S+/orders/": "DIRECTORY/",
    r"(\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d\.\d+Z": "TIME",
    r"\b\d{13}-[0-9a-f]{6,16}\b": "ID",
    r"\S+(?=, process \d)": "MACHINE",
    r"\b(commit|change|record)s\b": r"\1",
    r"tasks \((\d+(-\d+)?|none)\)": "tasks",  # a fast typist may stop a process before its tasks are open
    r"\d[\d.,]*( [KMGk]?i?B\b)?": "0",
    r"[ \t]+": " ",
}


class Shell:
    """A shell that stays open, so that `$!`, `%1` and `cd` work as they do for a person who types."""

    def __init__(self, directory: Path) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile"], cwd=directory, env=os.environ | {"PATH": path}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.type("set -m")

    def type(self, command: str) -> list[str]:
        """Run a command and return the lines that it prints."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        # the next job gets the number of one that has ended only if the shell knows that it has
        ended = "wait $! 2> /dev/null\n" if command == "kill -9 $!" else ""
        self._bash.stdin.write(f"{command}\n{ended}jobs > /dev/null\necho; echo {_END}\n")
        self._bash.stdin.flush()
        lines: list[str] = []
        for line in self._bash.stdout:
            if line.strip() == _END:
                return lines
            lines.append(line.rstrip())
        raise AssertionError(f"the shell has ended: {lines}")

    def close(self) -> None:
        """Kill the background processes and end the shell."""
        self.type("kill -9 $(jobs -p)")
        self._bash.communicate(timeout=300)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Start a shell in an empty directory. The fixture stops its broker at the end."""
    made = Shell(tmp_path)
    yield made
    made.type(f"cd {tmp_path}/orders && statemgr dev down")
    made.close()


def typed(session: str) -> Iterator[tuple[str, list[str]]]:
    """Return each command of a session with the lines below it. A line with only … stands for omitted lines."""
    for part in session.removeprefix("$ ").split("\n$ "):
        command, *lines = part.splitlines()
        yield command, [line for line in lines if line != "…"]


def missing(command: str, shown: list[str], printed: list[str]) -> list[str]:
    """Return the lines of the page that a command has not printed."""
    found = [shape(line, command) for line in printed]
    wanted = {line: shape(line.removesuffix("…").rstrip(), command) for line in shown}
    return [line for line, start in wanted.items() if not any(one.startswith(start) for one in found)]


def shape(line: str, command: str) -> str:
    """Return a line without the parts that differ between runs."""
    for pattern, same in () if command.startswith(_EXACT) else _DIFFERENT.items():
        line = re.sub(pattern, same, line)
    return line


@pytest.mark.long
@pytest.mark.crash
def test_the_service_of_the_quickstart(shell: Shell, tmp_path: Path) -> None:
    """Every order counts once after `kill -9`, the loss of the disk and the loss of the blobs.

    Each command prints what the page shows.
    """
    for session in [
        *blocks("docs/quickstart.md", "## A service", "console"),
        *blocks("docs/quickstart.md", "## Kill it, and take its disk away", "console"),
        *blocks("docs/quickstart.md", "## Take the backup away, too", "console"),
        *blocks("docs/quickstart.md", "## Two processes, and a clean stop", "console"),
    ]:
        for command, shown in typed(session):
            if not command.startswith(_INSTALLS):
                follow(shell, command, shown, tmp_path / "orders" / "job.toml")


@pytest.mark.long
@pytest.mark.crash
def test_the_five_minutes_of_the_readme(shell: Shell, tmp_path: Path) -> None:
    """The service has the right totals after `kill -9` and the loss of its disk.

    Where the page sleeps, the test repeats the scan until they are right.
    """
    (script,) = blocks("README.md", "## A service in five minutes", "sh")
    orders_of_each = iter(("125", "250"))
    for line in script.splitlines():
        command = line.partition(" #")[0].rstrip()
        if command == "statemgr store scan totals":
            wanted, deadline = [next(orders_of_each)] * 8, time.monotonic() + _DEADLINE_S
            while (found := re.findall(r'"orders": (\d+)', "\n".join(shell.type(command)))) != wanted:
                assert time.monotonic() < deadline, f"{line}: {found}"
        elif not command.startswith((*_INSTALLS, "sleep ")):
            follow(shell, command, [], tmp_path / "orders" / "job.toml")
    assert next(orders_of_each, None) is None


def follow(shell: Shell, command: str, shown: list[str], settings: Path) -> None:
    """Run a command until it prints what the page shows. The broker gets a free port."""
    given = command.replace("dev up --no-s3", "dev up --no-s3 --kafka-port 0").replace("tail -f", "cat")
    deadline = time.monotonic() + _DEADLINE_S
    printed = shell.type(given)
    while (wrong := missing(command, shown, printed)) and given.startswith(_LOOKS) and time.monotonic() < deadline:
        time.sleep(0.2)
        printed = shell.type(given)
    assert not wrong, "\n".join(["", f"$ {command}", *printed, "", "The page also shows:", *wrong])
    for address in re.findall(r"^bootstrap servers +(\S+)$", "\n".join(printed), re.MULTILINE):
        settings.write_text(settings.read_text("utf-8").replace("127.0.0.1:9092", address), "utf-8")
