"""An adoption of Samza's snapshots killed with SIGKILL at every phase.

Oracle: before the publish, the new job has no checkpoint and only blobs with a TTL, and one more run of the command
completes the adoption. After the publish, the new job has the old state, and its first opening removes the TTLs. The
old job's blobs are unchanged, and garbage collection deletes what the killed run left behind.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr import JobConfig
from statemgr.cli.main import cli
from statemgr.phases import Phase
from tests.commits import referenced
from tests.crash.test_adopt import ROOT
from tests.crash.test_kill import check_blobs
from tests.integration.test_adopt_samza import blob_files, snapshot_rows
from tests.integration.test_collect import names, time_passes
from tests.old_jobs import state
from tests.peers.samza import BLOBS, SamzaJob
from tests.servers import KafkaServer

pytestmark = pytest.mark.long
#: The phases at which the process dies, each with the occurrence that kills it.
STEPS = [
    (Phase.FENCE, 1),
    (Phase.UPLOAD, 1),
    (Phase.PUT_INDEX, 2),
    (Phase.READ_TOPIC, 1),
    (Phase.SEND_CHECKPOINT, 1),
    (Phase.COMMIT_TRANSACTION, 1),
    (Phase.ACKNOWLEDGED, 1),
]


@pytest.fixture(scope="module")
def samza(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> SamzaJob:
    """Run a Samza job, which every test adopts again for a different new job."""
    job = SamzaJob(kafka, tmp_path_factory.mktemp("samza"), 2, backends=(BLOBS,))
    job.run(job.send(snapshot_rows()))
    return job


@pytest.mark.parametrize("in_place", [False, True], ids=["uploaded", "in-place"])
@pytest.mark.parametrize(("phase", "number"), STEPS, ids=[f"{phase.value}-{number}" for phase, number in STEPS])
def test_killed_while_snapshots_are_adopted(
    samza: SamzaJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase, number: int, in_place: bool
) -> None:
    """After a kill at any phase, one more run completes the adoption."""
    monkeypatch.setattr(samza, "directory", tmp_path)
    blobs = Path(shutil.copytree(samza.blobs, tmp_path / "samza-blobs"))
    adopter = samza.adopter("--blobs", blobs.as_uri())
    topic = f"task.checkpoint.topic={samza.kafka.fresh_name('checkpoints')}"
    if in_place:
        how, config = ["--in-place"], adopter.init(samza.name, "--in-place", "--set", topic)
    else:
        uri = f"blob.store.uri={(tmp_path / 'blobs').as_uri()}"
        how, config = [], adopter.init(f"{samza.name}-new", "--set", uri, "--set", topic)
    before = blob_files(blobs)
    arguments = ["adopt", *adopter.old, "--config", str(adopter.file), "--settle", "0", "--write", *how]
    child = subprocess.run(
        [sys.executable, "-m", "tests.crash.adopt_child", phase.value, str(number), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert child.returncode == -signal.SIGKILL, child.stderr
    if phase is Phase.ACKNOWLEDGED:
        assert "has checkpoints already" in adopter.run("--write", *how, status=2)
    else:
        adopter.run("--write", *how)
    offsets = [{f"{samza.topic}-{n}": 3000} for n in (0, 1)]
    assert state(config) == ([{"counts": of} for of in samza.expected], offsets)
    check_blobs(config)
    assert before.items() <= blob_files(blobs).items()
    time_passes(monkeypatch)
    collected = CliRunner().invoke(cli, ["gc", "--config", str(adopter.file)])
    assert collected.exit_code == 0, collected.output
    needed = set().union(*(referenced(config, f"Partition {n}") for n in (0, 1)))
    assert names(config) == needed
    assert in_place or blob_files(blobs) == before
    there = JobConfig.from_mapping(config.to_mapping(), {"state.dir": str(tmp_path / "there")})
    assert state(there)[0] == [{"counts": of} for of in samza.expected]
