"""A consumer killed with SIGKILL at every step of commit and restore, and at random moments.

Oracle: the state restored afterwards, from each backend and on another machine, is exactly the model's state at the
input offset that the topic names; every blob that a retained checkpoint references exists.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from statemgr import JobConfig
from statemgr.phases import Phase
from statemgr.reader import JobReader
from tests.crash.model import STORES, state
from tests.jobs import DUAL, contents, elsewhere, job_mapping
from tests.servers import KafkaServer

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = {"changelog": ("kafka-changelog",), "blobs": ("blob-store",), "dual": DUAL}
COMMIT_PHASES = (
    Phase.FLUSH,
    Phase.CHECKPOINT_DIR,
    Phase.DIFF,
    Phase.UPLOAD,
    Phase.PUT_INDEX,
    Phase.PREPARED,
    Phase.BEGIN,
    Phase.SEND_CHANGELOG,
    Phase.SEND_CHECKPOINT,
    Phase.COMMIT_TRANSACTION,
    Phase.ACKNOWLEDGED,
    Phase.REMOVE_TTL,
    Phase.DELETE_BLOBS,
    Phase.DELETE_INDEX,
    Phase.CLEANED_UP,
)
RESTORE_PHASES = (
    Phase.FENCE,
    Phase.READ_TOPIC,
    Phase.PLAN,
    Phase.GET_INDEX,
    Phase.FETCH,
    Phase.REPLAY,
    Phase.VERIFY,
    Phase.SWAP,
    Phase.OPEN,
)
BLOB_ONLY = {Phase.DIFF, Phase.UPLOAD, Phase.PUT_INDEX, Phase.DELETE_INDEX, Phase.GET_INDEX, Phase.FETCH, Phase.VERIFY}
CHANGELOG_ONLY = {Phase.REPLAY}


def start(
    config: Mapping[str, object], commits: int, phase: Phase | None = None, occurrence: int = 1
) -> subprocess.Popen[bytes]:
    """A child that commits until ``commits``, and dies at a step if one is given."""
    order = {"config": config, "commits": commits, "phase": phase, "occurrence": occurrence}
    return subprocess.Popen([sys.executable, "-m", "tests.crash.child", json.dumps(order)], cwd=ROOT)


def check_exact(config: JobConfig, directory: Path, at_least: int, at_most: int) -> int:
    """The oracle. Returns the number of published commits."""
    backends = config.stores[STORES[0]].backup_factories
    published = set()
    for number, target in enumerate([config, *(elsewhere(config, directory / f"other-{b}", b) for b in backends)]):
        found, offsets = contents(target)
        commits = offsets.get("input-0", 0)
        assert at_least <= commits <= at_most, f"open {number}"
        for store in STORES:
            assert found[store] == state(store, commits), f"open {number}, store {store}, commit {commits}"
        published.add(commits)
    assert len(published) == 1
    check_blobs(config)
    return published.pop()


def check_blobs(config: JobConfig) -> None:
    """Every blob of every retained checkpoint exists and will not expire for the newest one."""
    with JobReader(config) as reader:
        for task, record in reader.records().items():
            for checkpoint in record.checkpoints:
                for store in checkpoint.state_checkpoint_markers.get("blob-store", {}):
                    index = reader.index(task, store, str(checkpoint.checkpoint_id))
                    for blob in index.blobs():
                        info = reader.blob_info(blob.blob_id)
                        assert info.size == blob.size
                        assert info.expires_ms is None, f"{blob.blob_id} of a published checkpoint would expire"


def applies(phase: Phase, backends: str) -> bool:
    """Whether the step exists for a set of backends."""
    return not (phase in BLOB_ONLY and backends == "changelog") and not (
        phase in CHANGELOG_ONLY and backends == "blobs"
    )


@pytest.mark.parametrize(
    ("backends", "phase"),
    [pytest.param(b, p, id=f"{b}-{p}") for b in BACKENDS for p in COMMIT_PHASES if applies(p, b)],
)
def test_killed_in_a_commit(kafka: KafkaServer, tmp_path: Path, backends: str, phase: Phase) -> None:
    """FAULTS 1, 2, 3, 5 and A41: killed at a step of the third commit, the state is that of the second or third."""
    mapping = job_mapping(kafka, tmp_path, backup=BACKENDS[backends], stores=STORES, task__checkpoint__retained=1)
    per_commit = {Phase.CLEANED_UP: 1}.get(phase, len(STORES) if phase in _PER_STORE else 1)
    child = start(mapping, 5, phase, 2 * per_commit + 1)
    assert child.wait(60) == -signal.SIGKILL
    config = JobConfig.from_mapping(mapping)
    done = check_exact(config, tmp_path, 1, 4)
    again = start(mapping, done + 2)
    assert again.wait(60) == 0, "the job goes on after the crash"
    last = elsewhere(config, tmp_path / "end", BACKENDS[backends][-1])
    found, offsets = contents(last)
    assert offsets == {"input-0": done + 2}
    assert found == {store: state(store, done + 2) for store in STORES}
    check_blobs(last)


_PER_STORE = {
    Phase.FLUSH,
    Phase.CHECKPOINT_DIR,
    Phase.DIFF,
    Phase.UPLOAD,
    Phase.PUT_INDEX,
    Phase.DELETE_INDEX,
}


@pytest.mark.parametrize(
    ("backends", "phase"),
    [pytest.param(b, p, id=f"{b}-{p}") for b in ("changelog", "blobs") for p in RESTORE_PHASES if applies(p, b)],
)
def test_killed_in_a_restore(kafka: KafkaServer, tmp_path: Path, backends: str, phase: Phase) -> None:
    """FAULT 7: killed at a step of a restore on another machine, the next restore there is whole."""
    mapping = job_mapping(kafka, tmp_path, backup=BACKENDS[backends], stores=STORES)
    assert start(mapping, 2).wait(60) == 0
    moved = {**mapping, "state.dir": str(tmp_path / "moved")}
    child = start(moved, 3, phase)
    assert child.wait(60) == -signal.SIGKILL
    check_exact(JobConfig.from_mapping(moved), tmp_path, 2, 2)


def test_killed_at_random_moments(kafka: KafkaServer, tmp_path: Path) -> None:
    """Random kills, again and again, on the same job: never a lost commit, never a state between two commits."""
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    print(f"seed {seed}")
    mapping = job_mapping(kafka, tmp_path, stores=STORES)
    config = JobConfig.from_mapping(mapping)
    done = 0
    for round_number in range(8):
        child = start(mapping, 10_000)
        time.sleep(1.0 + draw.random() * 1.5)
        child.kill()
        child.wait(30)
        done = check_exact(config, tmp_path / str(round_number), done, 10_000)
    assert done > 0
