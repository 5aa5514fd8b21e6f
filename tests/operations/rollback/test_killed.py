"""``statemgr checkpoints rollback`` killed with SIGKILL at every phase.

Oracle: either the old or the new checkpoint is current, in both backends and on another machine. Every blob that a
retained checkpoint references exists. A second run of the command completes the rollback.
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
from tests.commits import check_blobs, current
from tests.core.crash.model import STORES, state
from tests.core.crash.test_kill import ROOT, start
from tests.jobs import DUAL, contents, elsewhere, job_mapping
from tests.servers import KafkaServer

#: Phases of a rollback, and whether the new checkpoint is current after them.
STEPS = {
    Phase.FENCE: False,
    Phase.READ_TOPIC: False,
    Phase.PLAN: False,
    Phase.GET_INDEX: False,
    Phase.SWAP: False,
    Phase.FLUSH: False,
    Phase.CHECKPOINT_DIR: False,
    Phase.PREPARED: False,
    Phase.CLEANED_UP: False,
    Phase.BEGIN: False,
    Phase.SEND_CHANGELOG: False,
    Phase.SEND_CHECKPOINT: False,
    Phase.COMMIT_TRANSACTION: False,
    Phase.ACKNOWLEDGED: True,
}


@pytest.mark.long
@pytest.mark.parametrize("phase", STEPS, ids=str)
def test_killed_in_a_rollback(kafka: KafkaServer, tmp_path: Path, phase: Phase) -> None:
    """After a kill at any phase of a rollback from the fifth commit to the third, a second run completes it."""
    mapping = job_mapping(kafka, tmp_path, backup=DUAL, stores=STORES, kind="segments", task__checkpoint__retained=9)
    config = JobConfig.from_mapping(mapping)
    assert start(mapping, 5).wait(60) == 0
    record = current(config)
    assert record is not None
    target = next(c for c in record.checkpoints if c.input_offsets == {"input-0": 3})
    here = elsewhere(config, tmp_path / "moved", ["blob-store", "kafka-changelog"])
    write_toml(here, tmp_path / "job.toml")
    arguments = [
        "checkpoints", "rollback", "--config", str(tmp_path / "job.toml"), "--to", str(target.checkpoint_id), "--write",
    ]  # fmt: skip
    order = json.dumps({"arguments": arguments, "phase": phase})
    killed = subprocess.run([sys.executable, "-m", "tests.core.crash.command_child", order], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    _check(config, tmp_path / "killed", 3 if STEPS[phase] else 5)
    again = subprocess.run([sys.executable, "-m", "statemgr", *arguments], cwd=ROOT, check=False)
    assert again.returncode == 0
    _check(config, tmp_path / "again", 3)
    assert start({**mapping, "state.dir": str(tmp_path / "moved")}, 6).wait(60) == 0
    _check(config, tmp_path / "goes-on", 6)


def _check(config: JobConfig, directory: Path, commits: int) -> None:
    """Check that both backends have the state after ``commits`` commits, and that no blob is missing."""
    for factory in DUAL:
        found, offsets = contents(elsewhere(config, directory / factory, factory))
        assert offsets == {"input-0": commits}
        assert found == {store: state(store, commits) for store in STORES}
    check_blobs(config)
