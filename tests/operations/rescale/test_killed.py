"""``statemgr rescale`` and ``--undo`` killed with SIGKILL at every phase.

Oracle: either the old or the new layout is current and complete, in both backends and on another machine. A second run
of the command completes the rescale, and every blob that a retained checkpoint of either layout needs exists.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from statemgr import JobConfig
from statemgr.phases import Phase
from tests.cli.test_running_job import write_toml
from tests.core.crash.test_kill import ROOT
from tests.jobs import DUAL, SEGMENTS
from tests.operations.rescale.test_rescale import check, fill, job, some_state
from tests.servers import KafkaServer

#: Phases of a rescale of two stores (counted from the first), and whether the new layout is current after them.
STEPS = {
    (Phase.SPLIT, 1): False,
    (Phase.SPLIT, 2): False,
    (Phase.MAKE_STORES, 1): False,
    (Phase.STORE, 1): False,
    (Phase.UPLOAD, 2): False,
    (Phase.STORED, 1): False,
    (Phase.STORED, 4): False,
    (Phase.FENCE, 1): False,
    (Phase.BEGIN, 1): False,
    (Phase.SEND_CHECKPOINT, 1): False,
    (Phase.COMMIT_TRANSACTION, 1): False,
    (Phase.ACKNOWLEDGED, 1): True,
}
#: Phases of an undo, and whether the old layout is current after them.
UNDO_STEPS = {Phase.FENCE: False, Phase.SEND_CHECKPOINT: False, Phase.ACKNOWLEDGED: True}


def command(file: Path, *arguments: str, kill: tuple[Phase, int] | None = None) -> None:
    """Run ``statemgr rescale`` in its own process and check that it ends as expected."""
    line = ["rescale", "--config", str(file), *arguments]
    module = ["statemgr", *line]
    if kill is not None:
        order = {"arguments": line, "phase": kill[0], "number": kill[1]}
        module = ["tests.operations.rescale.child", json.dumps(order)]
    ended = subprocess.run([sys.executable, "-m", *module], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == (0 if kill is None else -signal.SIGKILL), ended.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "published"), [pytest.param(*item, id=f"{item[0][0]}-{item[0][1]}") for item in STEPS.items()]
)
def test_killed_in_a_rescale(kafka: KafkaServer, tmp_path: Path, step: tuple[Phase, int], published: bool) -> None:
    """A killed rescale from two tasks to three leaves a complete layout. The job commits between the two runs."""
    config, state, file = job(kafka, tmp_path, 2, kind=SEGMENTS), some_state(300), tmp_path / "job.toml"
    fill(config, state)
    write_toml(config, file)
    command(file, "--tasks", "3", "--write", "--parallel", "2", kill=step)
    if not published:
        check(config, state, tmp_path / "killed")
        late = some_state(30, "late-")
        fill(config, late, 12)
        state = {**state, **late}
    command(file, "--tasks", "3", "--write", "--parallel", "2")
    new = JobConfig.from_file(file)
    assert new.tasks == 3
    check(new, state, tmp_path / "again")
    more = some_state(30, "more-")
    fill(new, more, 20)
    check(new, {**state, **more}, tmp_path / "goes-on")
    command(file, "--undo", "--write")
    check(JobConfig.from_file(file), state, tmp_path / "back")


#: Phases of a driver that lets other processes build the new stores, and whether the job has changelogs. A killed
#: driver may leave such a process behind. It never harms blobs, but may make the next run of a job with changelogs
#: fail.
DRIVER_STEPS = [
    (Phase.SPLIT, 2, False),
    (Phase.STORED, 1, False),
    (Phase.CATCH_UP, 1, False),
    (Phase.FENCE, 1, True),
    (Phase.UPLOAD, 1, True),
    (Phase.SEND_CHECKPOINT, 1, True),
    (Phase.ACKNOWLEDGED, 1, True),
]


@pytest.mark.long
@pytest.mark.parametrize(("phase", "number", "dual"), DRIVER_STEPS)
def test_a_driver_is_killed(kafka: KafkaServer, tmp_path: Path, phase: Phase, number: int, dual: bool) -> None:
    """After a driver is killed, the next run continues, with other processes or alone. The job commits in between."""
    config = job(kafka, tmp_path, 2, kind=SEGMENTS, backup=DUAL if dual else ("blob-store",))
    state, file = some_state(300), tmp_path / "job.toml"
    fill(config, state)
    write_toml(config, file)
    if phase in (Phase.CATCH_UP, Phase.UPLOAD):  # the first run builds everything, and the second one catches up
        drive(file, kill=(Phase.FENCE, 1))
        late = some_state(30, "late-")
        fill(config, late, 12)
        state = {**state, **late}
    drive(file, kill=(phase, number))
    if phase is not Phase.ACKNOWLEDGED:
        check(config, state, tmp_path / "killed")
        last = some_state(30, "last-")
        fill(config, last, 20)
        state = {**state, **last}
    if dual:
        drive(file)
    command(file, "--tasks", "3", "--write", "--parallel", "2")
    check(JobConfig.from_file(file), state, tmp_path / "again")
    command(file, "--undo", "--write")
    check(JobConfig.from_file(file), state, tmp_path / "back")


def drive(file: Path, kill: tuple[Phase, int] | None = None) -> None:
    """Rescale to three tasks in a process that lets other processes build the stores."""
    order = {"config": str(file), "tasks": 3, **({"phase": kill[0], "number": kill[1]} if kill else {})}
    run = [sys.executable, "-m", "tests.operations.rescale.child", json.dumps(order)]
    ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == (0 if kill is None else -signal.SIGKILL), ended.stderr


@pytest.mark.long
@pytest.mark.parametrize(("phase", "number"), [(Phase.CATCH_UP, 2), (Phase.UPLOAD, 1), (Phase.COMMIT_TRANSACTION, 1)])
def test_killed_again(kafka: KafkaServer, tmp_path: Path, phase: Phase, number: int) -> None:
    """A rescale survives two kills: one after all stores are built, and one while it catches up with later commits."""
    config, state, file = job(kafka, tmp_path, 2, kind=SEGMENTS), some_state(300), tmp_path / "job.toml"
    fill(config, state)
    write_toml(config, file)
    command(file, "--tasks", "3", "--write", "--parallel", "2", kill=(Phase.FENCE, 1))
    for at, (name, kill) in enumerate([("late-", (phase, number)), ("last-", None)]):
        late = some_state(40, name)
        fill(config, late, 12 + at)
        state = {**state, **late}
        command(file, "--tasks", "3", "--write", "--parallel", "2", kill=kill)
    check(JobConfig.from_file(file), state, tmp_path / "again")


@pytest.mark.parametrize("phase", [pytest.param(p, id=str(p), marks=pytest.mark.long) for p in UNDO_STEPS])
def test_killed_in_an_undo(kafka: KafkaServer, tmp_path: Path, phase: Phase) -> None:
    """A killed undo from three tasks to two leaves a complete layout, and a second run completes it."""
    config, state, file = job(kafka, tmp_path, 2, kind=SEGMENTS), some_state(300), tmp_path / "job.toml"
    fill(config, state)
    write_toml(config, file)
    command(file, "--tasks", "3", "--write")
    new = JobConfig.from_file(file)
    command(file, "--undo", "--write", kill=(phase, 1))
    check(config if UNDO_STEPS[phase] else new, state, tmp_path / "killed")
    if not UNDO_STEPS[phase]:
        command(file, "--undo", "--write")
    else:
        command(file, "--tasks", "2", "--write")
    check(JobConfig.from_file(file), state, tmp_path / "again")
