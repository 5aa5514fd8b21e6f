"""A peer's harness: its place, its build, and the way to run its programs. Starts processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from statemgr.errors import StatemgrError

_BUILD_DEADLINE_S = 900
_RUN_DEADLINE_S = 600
#: The files of a state are private. Samza compares the modes of restored files with theirs, but sets none.
_PRIVATE = 0o077


class PeerFailed(StatemgrError):
    """A peer's harness did not build or run. The message contains the end of its output."""


class Peer:
    """A harness that is copied from ``source`` to ``directory`` and built there."""

    def __init__(self, directory: Path, source: Path) -> None:
        self.directory = directory
        self.source = source

    @property
    def built(self) -> bool:
        """Whether the build exists and is as new as its source."""
        mark = self.directory / ".built"
        newest = max((path.stat().st_mtime for path in self.source.rglob("*") if path.is_file()), default=0.0)
        return mark.exists() and mark.stat().st_mtime >= newest

    def build(self) -> None:
        """Fetch and compile everything that the harness needs. Raises: PeerFailed."""
        raise NotImplementedError

    def step(self, *command: str | Path) -> None:
        """Run one step of a build in the harness's directory."""
        self.run(command, {}, _BUILD_DEADLINE_S)

    def measure(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> dict[str, Any]:
        """Run a program of the harness. Returns its last line of JSON. Raises: PeerFailed."""
        output = self.run(command, environment)
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if not lines:
            raise PeerFailed(f"{command[-1]} printed no result: {output[-500:]}")
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def run(
        self, command: Sequence[str | Path], environment: Mapping[str, str], deadline_s: float = _RUN_DEADLINE_S
    ) -> str:
        """Run a program in the harness's directory. Returns its output. Raises: PeerFailed."""
        texts = [str(part) for part in command]
        try:
            run = subprocess.run(
                texts,
                cwd=self.directory,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=deadline_s,
                umask=_PRIVATE,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerFailed(f"{texts[0]}: {error}") from error
        if run.returncode != 0:
            raise PeerFailed(f"{' '.join(texts)[:200]} failed: {(run.stderr + run.stdout).strip()[-1000:]}")
        return run.stdout
