"""The example of ``statemgr init --example``, with the commands that it prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from statemgr.errors import MissingError
from statemgr_tools.dev import down

_DEADLINE_S = 600.0
_CUSTOMERS = 8


class Shell:
    """Runs commands in the directory of the example, as somebody types them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.directory, env=self.environment, capture_output=True, text=True, check=False
        )

    def run(self, *command: str) -> str:
        return _checked(self.call(*command))

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.directory / "service.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "service.py"], cwd=self.directory, env=self.environment, stdout=log, stderr=log
            )

    def totals(self) -> dict[str, tuple[int, int]]:
        """Customer → orders and amount, of the published state; nothing as long as no checkpoint can be read.

        The running job replaces its checkpoints, so that one may be gone while it is read.
        """
        done = self.call("statemgr", "store", "scan", "totals", "--json")
        if done.returncode == MissingError.exit_status:
            return {}
        found = json.loads(_checked(done))
        return {row["key"]: (row["value"]["orders"], row["value"]["amount"]) for row in found}


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _until(met: Callable[[], bool], service: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not met():
        assert service.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def _expected(*batches: int) -> dict[str, tuple[int, int]]:
    """The totals of everything that ``send.py`` has sent, by its own rule."""
    orders, amounts = [0] * _CUSTOMERS, [0] * _CUSTOMERS
    for count in batches:
        for number in range(count):
            orders[number % _CUSTOMERS] += 1
            amounts[number % _CUSTOMERS] += number % 10 + 1
    names = ["ada", "barbara", "dorothy", "edsger", "grace", "leslie", "niklaus", "tony"]
    return {name: (orders[place], amounts[place]) for place, name in enumerate(names)}


@pytest.mark.long
@pytest.mark.crash
def test_the_example_keeps_its_totals_over_a_kill_and_the_loss_of_its_disk(tmp_path: Path) -> None:
    """init --example, dev up, topics, service, messages, kill -9, start again: every order counts once."""
    outside = Shell(tmp_path)
    outside.run("statemgr", "init", "orders", "--example")
    here = Shell(tmp_path / "orders")
    service: subprocess.Popen[bytes] | None = None
    try:
        up = json.loads(here.run("statemgr", "dev", "up", "--no-s3", "--kafka-port", "0", "--json"))
        file = here.directory / "job.toml"
        file.write_text(file.read_text().replace("127.0.0.1:9092", up["bootstrap_servers"]))
        here.run("statemgr", "topics", "create")
        log = here.directory / "service.log"
        here.run(sys.executable, "send.py", "1000")
        service = here.start()
        _until(lambda: here.totals() == _expected(1000), service, log)

        here.run(sys.executable, "send.py", "3000")
        service.kill()
        service.wait()
        shutil.rmtree(here.directory / ".statemgr" / "state")
        here.run(sys.executable, "send.py", "500")
        service = here.start()
        _until(lambda: here.totals() == _expected(1000, 3000, 500), service, log)
        service.terminate()
        assert service.wait(_DEADLINE_S) == 0

        assert "2 passed" in here.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    finally:
        if service is not None and service.poll() is None:
            service.kill()
            service.wait()
        down(here.directory / ".statemgr" / "dev")
