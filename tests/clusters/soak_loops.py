"""The consumer loop of a soak: members in their own processes, and what goes wrong with them."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from statemgr import JobConfig
from statemgr.errors import FencedError, OutcomeUnknownError, RetryableError, from_json
from tests.clusters.soak_servers import Servers
from tests.loop_members import QUICK_GROUP, ROOT

PARTITIONS = 4
#: Errors that may end a loop here.
_EXPECTED = (FencedError, RetryableError, OutcomeUnknownError)


class Member:
    """A member, which is started again whenever it ends."""

    def __init__(self, order: dict[str, Any], directory: Path) -> None:
        self._order, self._directory = order, directory
        self.starts = 0
        self.start()

    @property
    def log(self) -> Path:
        """What it writes down."""
        return self._directory / "history"

    def start(self) -> None:
        """Start it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        order = self._order | {"log": str(self.log)}
        order["config"] = {**order["config"], "state.dir": str(self._directory / "state")}
        with (self._directory / "err").open("ab") as errors, (self._directory / "out").open("wb") as out:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "tests.clusters.recording", json.dumps(order)],
                cwd=ROOT,
                stdout=out,
                stderr=errors,
            )

    def error(self) -> str:
        """Return the kind of the typed error that ended it. Fail if the error is not one that the faults explain."""
        lines = (self._directory / "out").read_text().splitlines()
        assert self.child.returncode == 1, (self.child.returncode, self.tail())
        assert lines, self.tail()
        error = from_json(lines[-1])
        assert isinstance(error, _EXPECTED), error
        return type(error).__name__

    def tail(self) -> str:
        """Return the end of what it has printed."""
        return (self._directory / "err").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """Kill it."""
        self.child.kill()
        self.child.wait()

    def lose_disk(self) -> None:
        """Its machine gets an empty disk."""
        shutil.rmtree(self._directory / "state", ignore_errors=True)


class Loops:
    """The members. The first one is never killed, so that it shows whether a process grows."""

    def __init__(self, servers: Servers, directory: Path, topic: str, output: str) -> None:
        self.mapping = servers.mapping("LOOPS", "loops", PARTITIONS, directory) | {
            name.replace("__", "."): value for name, value in QUICK_GROUP.items()
        }
        self.config = JobConfig.from_mapping(servers.mapping(None, "loops", PARTITIONS, directory / "reader"))
        order = {"config": self.mapping, "group": "loops", "topic": topic, "output": output}
        self.ended: Counter[str] = Counter()
        self.members = [Member(order, directory / f"member-{number}") for number in range(3)]

    def look(self) -> None:
        """Start members that have ended by themselves."""
        for member in self.members:
            if member.child.poll() is not None:
                self.ended[f"loop: {member.error()}"] += 1
                member.start()

    def faults(self, chance: random.Random, over: threading.Event) -> list[Callable[[], Any]]:
        """Return what can go wrong."""

        def _restart(stop: Callable[[Member], None]) -> None:
            member = chance.choice(self.members[1:])
            stop(member)
            over.wait(chance.choice([0, 0, 8]))
            if member.child.poll() is not None:
                member.start()

        def member_is_killed() -> None:
            _restart(Member.kill)

        def member_loses_its_disk() -> None:
            _restart(lambda member: (member.kill(), member.lose_disk()))  # type: ignore[arg-type, return-value]

        def member_is_stopped() -> None:
            def stop(member: Member) -> None:
                member.child.terminate()
                try:
                    member.child.wait(120)
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"it does not stop: {member.tail()}") from None
                # SIGTERM ends a process at once that has not begun its loop yet
                if member.child.returncode not in (0, -signal.SIGTERM):
                    self.ended[f"loop, while it stopped: {member.error()}"] += 1

            _restart(stop)

        def member_is_suspended() -> None:
            member = chance.choice(self.members)
            member.child.send_signal(signal.SIGSTOP)
            over.wait(chance.choice([chance.uniform(0, 6), chance.uniform(6, 45)]))
            member.child.send_signal(signal.SIGCONT)

        return [member_is_killed, member_is_killed, member_loses_its_disk, member_is_stopped, member_is_suspended]

    def processes(self) -> list[psutil.Process]:
        """Return the members that run."""
        return [psutil.Process(member.child.pid) for member in self.members if member.child.poll() is None]

    def stop(self) -> None:
        """Stop all members in good order."""
        for member in self.members:
            if member.child.poll() is None:
                member.child.send_signal(signal.SIGCONT)
                member.child.terminate()
        for member in self.members:
            member.child.wait(180)

    def kill(self) -> None:
        """Kill all members."""
        for member in self.members:
            member.kill()
