"""An adoption that is killed with SIGKILL at every phase, or stopped while another one of the same job runs.

Oracle: the new job has exactly the old state and offsets, every record was copied once, the old topics are unchanged,
and one more run of the command completes the adoption, or says that it is complete.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from statemgr import JobConfig
from statemgr.phases import Phase
from statemgr.reader import JobReader
from tests.kafka_jobs import committed, wait_until
from tests.old_jobs import Adopter, await_empty, commit, ends, make, member, state, write
from tests.servers import KafkaServer

ROOT = Path(__file__).resolve().parents[3]
STATE = [{f"{task}-{n}".encode(): b"value %d" % n for n in range(1200)} for task in (0, 1)]
#: Phases, each with the occurrence at which the process is struck; those of the second tuple only by ``heavy`` tests.
CORE = ((Phase.COPIED, 2), (Phase.COMMIT_TRANSACTION, 1), (Phase.ACKNOWLEDGED, 1))
REST = (
    (Phase.FENCE, 1),
    (Phase.REPLAY, 1),
    (Phase.COPY, 1),
    (Phase.COPIED, 1),
    (Phase.SWAP, 1),
    (Phase.COPY, 2),
    (Phase.SWAP, 2),
    (Phase.READ_TOPIC, 1),
    (Phase.BEGIN, 1),
    (Phase.SEND_CHANGELOG, 1),
    (Phase.SEND_CHECKPOINT, 1),
)
#: Phases of an adoption in place; the first one is the end of the second task's local copy.
IN_PLACE = (
    (Phase.SWAP, 2),
    (Phase.FENCE, 1),
    (Phase.REPLAY, 1),
    (Phase.SWAP, 1),
    (Phase.READ_TOPIC, 1),
    (Phase.SEND_CHECKPOINT, 1),
    (Phase.COMMIT_TRANSACTION, 1),
    (Phase.ACKNOWLEDGED, 1),
)


def start(
    adopter: Adopter, how: Sequence[str], strike: str, phase: Phase, number: int, *more: str
) -> subprocess.Popen[str]:
    """Start the command in a process that strikes itself with a signal at a phase."""
    arguments = ["adopt", *adopter.old, "--config", str(adopter.file), "--settle", "0", "--write", *how, *more]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.operations.adopt.child", strike, phase.value, str(number), *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@contextmanager
def standing(child: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Wait until a process has stopped itself. At the end of the block it goes on."""
    try:
        wait_until(lambda: os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None)
        yield child
    finally:
        child.send_signal(signal.SIGCONT)


@dataclass
class Old:
    """An old job of two tasks, the command that adopts it, and the configuration of the new job."""

    kafka: KafkaServer
    adopter: Adopter
    name: str
    config: JobConfig
    how: tuple[str, ...]
    before: object

    def start(self, number: int, phase: Phase, strike: str = "SIGKILL", *more: str) -> subprocess.Popen[str]:
        """Start the command in a process that strikes itself."""
        return start(self.adopter, self.how, strike, phase, number, *more)

    def check(self) -> None:
        """Complete the adoption, and check it."""
        self.adopter.run("--write", *self.how)
        assert "already adopted" in self.adopter.run("--write", *self.how)
        with JobReader(self.config) as reader:
            published = {record.current.stores["totals"] for record in reader.records().values()}
        copies = {path.name for path in Path(str(self.config.state_dir)).glob("**/committed/*") if path.is_dir()}
        assert copies <= published, "the local copies of a run that was killed are removed"
        offsets = [{f"{self.name}-in-{n}": 0} for n in (0, 1)]
        assert state(self.config) == ([{"totals": of} for of in STATE], offsets)
        assert ends(self.kafka, f"{self.name}-totals") == self.before
        for partition, of in enumerate(STATE):
            records = committed(self.config, self.config.stores["totals"].changelog_topic, partition)
            assert len(records) == 2 * len(of) + 2


def stopped(kafka: KafkaServer, directory: Path, *how: str) -> Old:
    """An old job that has written each key twice, and has deleted one."""
    name = kafka.fresh_name("old")
    make(kafka, f"{name}-totals", min__compaction__lag__ms="14400000")
    make(kafka, f"{name}-in")
    for partition, of in enumerate(STATE):
        write(kafka, f"{name}-totals", partition, [(b"gone", b"1"), *((key, b"older") for key in of)])
        write(kafka, f"{name}-totals", partition, [*of.items(), (b"gone", None)])
    commit(kafka, name, {(f"{name}-in", 0): 0, (f"{name}-in", 1): 0})
    adopter = Adopter(kafka, directory, "--from", "raw", "--job", name, "--changelog", f"totals={name}-totals")
    config = adopter.init(f"{name}-new", *how)
    return Old(kafka, adopter, name, config, how, ends(kafka, f"{name}-totals"))


def ids(steps: tuple[tuple[Phase, int], ...]) -> list[str]:
    """The names of the steps."""
    return [f"{phase.value}-{number}" for phase, number in steps]


@pytest.mark.parametrize(("phase", "number"), CORE, ids=ids(CORE))
def test_killed_in_an_adoption(kafka: KafkaServer, tmp_path: Path, phase: Phase, number: int) -> None:
    """After a kill at any phase, one more run completes the adoption."""
    _killed(stopped(kafka, tmp_path), phase, number)


@pytest.mark.heavy
@pytest.mark.parametrize(("phase", "number"), REST, ids=ids(REST))
def test_killed_at_other_steps(kafka: KafkaServer, tmp_path: Path, phase: Phase, number: int) -> None:
    """The same for the other steps."""
    _killed(stopped(kafka, tmp_path), phase, number)


@pytest.mark.parametrize(
    ("phase", "number"),
    [pytest.param(*step, marks=() if step is IN_PLACE[0] else pytest.mark.heavy) for step in IN_PLACE],
    ids=ids(IN_PLACE),
)
def test_killed_in_an_adoption_in_place(kafka: KafkaServer, tmp_path: Path, phase: Phase, number: int) -> None:
    """The same for an adoption in place: the old changelog has no record more."""
    _killed(stopped(kafka, tmp_path, "--in-place"), phase, number)


def _killed(old: Old, phase: Phase, number: int) -> None:
    child = old.start(number, phase)
    said, _ = child.communicate(timeout=600)
    assert child.returncode == -signal.SIGKILL, said
    if phase is Phase.ACKNOWLEDGED:
        assert "already adopted: checkpoint" in old.adopter.run("--write", *old.how)
    old.check()


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(6))
def test_killed_again_and_again(kafka: KafkaServer, tmp_path: Path, seed: int) -> None:
    """Kills at random moments, some of which are within a step, until a run succeeds."""
    old, chance = stopped(kafka, tmp_path, *(["--in-place"] if seed % 3 == 2 else [])), random.Random(seed)
    for _ in range(5):
        child = old.start(0, Phase.FENCE)  # the number 0 never comes
        time.sleep(chance.uniform(0.5, 3.5))
        child.kill()
        child.communicate(timeout=60)
    old.check()


@pytest.mark.parametrize("phase", [pytest.param(Phase.COPIED, marks=pytest.mark.long), Phase.COMMIT_TRANSACTION])
def test_two_operators_at_once(kafka: KafkaServer, tmp_path: Path, phase: Phase) -> None:
    """A second run, with a directory of another machine, overtakes one that is stopped. That one publishes nothing
    when it goes on: it is fenced, and says so."""
    _overtaken(stopped(kafka, tmp_path), tmp_path, phase, 1, "FencedError")


@pytest.mark.heavy
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in-place"])
@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (Phase.FENCE, "already adopted"),
        (Phase.READ_TOPIC, "already adopted"),
        (Phase.SEND_CHECKPOINT, "FencedError"),
        (Phase.ACKNOWLEDGED, "adopted: checkpoint"),
    ],
)
def test_two_operators_at_other_steps(
    kafka: KafkaServer, tmp_path: Path, phase: Phase, said: str, in_place: bool
) -> None:
    """The same at other steps. One that has not published yet finds out that the job is adopted if it still has to
    read the checkpoint topic, and one that has published goes on to its end."""
    _overtaken(stopped(kafka, tmp_path, *(["--in-place"] if in_place else [])), tmp_path, phase, 1, said)


@pytest.mark.heavy
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in-place"])
def test_the_old_job_joins_its_group_in_the_middle(
    kafka: KafkaServer, tmp_path: Path, in_place: bool, protocol: str
) -> None:
    """A member of the old group that has committed nothing yet is noticed by the second look. When it has left, one
    more run completes the adoption."""
    old = stopped(kafka, tmp_path, *(["--in-place"] if in_place else []))
    phase = Phase.READ_TOPIC if in_place else Phase.COPIED
    with standing(old.start(1, phase, "SIGSTOP")) as first, member(kafka, old.name, f"{old.name}-in", protocol):
        first.send_signal(signal.SIGCONT)
        output, _ = first.communicate(timeout=120)
    assert first.returncode == 2, output
    assert "the old job is not stopped" in output
    await_empty(kafka, old.name)
    old.check()


def _overtaken(old: Old, directory: Path, phase: Phase, number: int, said: str) -> None:
    with standing(old.start(number, phase, "SIGSTOP", "--set", f"state.dir={directory / 'machine'}")) as first:
        old.adopter.run("--write", *old.how)
    output, _ = first.communicate(timeout=120)
    assert said in output, output
    old.check()


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(4))
def test_two_operators_race(kafka: KafkaServer, tmp_path: Path, seed: int) -> None:
    """Two runs at the same time: at least one succeeds, and there is one adoption."""
    old, chance = stopped(kafka, tmp_path), random.Random(seed)
    children = []
    for machine in ("one", "two"):
        children.append(old.start(0, Phase.FENCE, "SIGKILL", "--set", f"state.dir={tmp_path / machine}"))
        time.sleep(chance.uniform(0, 0.6))
    outputs = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children].count(0) >= 1, outputs
    old.check()
