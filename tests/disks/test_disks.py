"""Disks that fail, and machines that lose power: every outcome is an exact state or a typed error.

A library that the owner loads (``faults.c``) is the disk. It needs a C compiler and Linux.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from statemgr import JobConfig
from tests.clusters.recording import read_in_the_end, recorded
from tests.disks.owner import KINDS
from tests.disks.power import lose_power, settle
from tests.jobs import DUAL, job_mapping
from tests.loop_members import ROOT
from tests.servers import KafkaServer

#: What each kind of call may end with; 0 is a short write, or an altered byte that was read.
_ERRORS = {
    "write": [0, errno.EIO, errno.ENOSPC, errno.EDQUOT],
    "read": [0, errno.EIO],
    "sync": [errno.EIO, errno.ENOSPC],
    "rename": [errno.EIO, errno.ENOSPC],
    "open": [errno.EIO, errno.ENOSPC, errno.EMFILE],
    "remove": [errno.EIO],
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The disk, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and Linux: the disk is a library that is loaded with LD_PRELOAD")
    library = tmp_path_factory.mktemp("disk") / "faults.so"
    source = Path(__file__).with_name("faults.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl", "-lpthread"]
    subprocess.run(command, check=True, capture_output=True)
    return library


class Machine:
    """A disk with a job's state and blobs, and owners that run there."""

    def __init__(
        self, kafka: KafkaServer, directory: Path, library: Path, backup: tuple[str, ...], interval: str
    ) -> None:
        self.disk, self._shadow = directory / "disk", directory / "shadow"
        self.disk.mkdir(0o700)
        self.log, self._library = directory / "log", library
        self._boots = 0
        mapping = job_mapping(kafka, self.disk, backup=backup)
        mapping |= {"task.commit.snapshot.interval": [interval], "task.checkpoint.retained": 2}
        self.config = JobConfig.from_mapping(mapping)

    def start(self, **more: object) -> subprocess.Popen[str]:
        """Start an owner, after the system has started."""
        self._boots += 1
        boot = self.log.with_name("boot")
        boot.write_text(f"boot-{self._boots}")
        settle(self.disk, self._shadow)
        environment = {
            "LD_PRELOAD": str(self._library),
            "DISK_ROOT": str(self.disk),
            "DISK_SHADOW": str(self._shadow),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        order = {"config": self.config.to_mapping(), "log": str(self.log), "boot": str(boot)} | more
        with self.log.with_name("err").open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.disks.owner", json.dumps(order)],
                cwd=ROOT,
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def lose_power(self, chance: random.Random, more: float) -> int:
        """Lose what was not synced. Returns: in how many places."""
        return lose_power(self.disk, self._shadow, chance, more)

    def errors(self) -> str:
        """The end of what the owners have printed."""
        return self.log.with_name("err").read_text()[-4000:]

    def check(self) -> None:
        """The history must be right, from each backend alone."""
        read_in_the_end(self.config, self.log.parent, self.log, self.config.stores["totals"].backup_factories)
        history = recorded([self.log])
        assert history.problems() == []
        assert sum(commit.outcome == "ok" for commit in history.commits) > 5


@pytest.mark.parametrize("backup", [("blob-store",), DUAL], ids=["blobs", "dual"])
@pytest.mark.heavy
def test_power_is_lost(kafka: KafkaServer, tmp_path: Path, library: Path, backup: tuple[str, ...]) -> None:
    """At random moments, again and again: with nothing of what was not synced, and with some of it.

    Each start finds the newest acknowledged state or a newer one, in a directory of blobs that lost its power, too.
    """
    seed = int(os.environ.get("STATEMGR_TEST_SEED") or random.randrange(1 << 32))
    print(f"seed {seed}")
    chance, machine, lost = random.Random(seed), Machine(kafka, tmp_path, library, backup, "3 commits"), 0
    for _ in range(12):
        owner = machine.start()
        assert owner.stdout is not None
        for _ in range(chance.randrange(1, 12)):
            assert owner.stdout.readline() == "committed\n", machine.errors()
        owner.kill()
        owner.communicate()
        lost += machine.lose_power(chance, chance.choice([0.0, 0.0, 0.3, 0.7]))
    assert lost
    machine.check()


@pytest.mark.parametrize("backup", [("blob-store",), DUAL], ids=["blobs", "dual"])
@pytest.mark.heavy
def test_calls_fail(kafka: KafkaServer, tmp_path: Path, library: Path, backup: tuple[str, ...]) -> None:
    """EIO, ENOSPC, no descriptors, short writes and altered bytes, at random calls of commits and openings."""
    seed = int(os.environ.get("STATEMGR_TEST_SEED") or random.randrange(1 << 32))
    print(f"seed {seed}")
    chance, machine = random.Random(seed), Machine(kafka, tmp_path, library, backup, "1 commit")
    faults = []
    for _ in range(60):
        kind = chance.choice(KINDS)
        faults.append(
            [kind, chance.choice([1, 2, 3, 5, 8, 13]), chance.choice([1, 1, 3, 1000]), chance.choice(_ERRORS[kind])]
        )
    owner = machine.start(faults=faults)
    out, _ = owner.communicate(timeout=600)
    assert owner.returncode == 0, machine.errors()
    seen = json.loads(out.splitlines()[-1])
    print(seen)
    assert seen["hits"] > 30
    machine.check()
