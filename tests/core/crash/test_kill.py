"""A consumer killed with SIGKILL at every phase of commit and restore, and at random moments.

Oracle: the state restored afterwards, from each backend and on another machine, is exactly the model's state at the
input offset on the checkpoint topic. Every blob that a retained checkpoint references exists.
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
from tests.commits import check_blobs
from tests.core.crash.model import STORES, state
from tests.jobs import DUAL, INTERVALS, SNAPSHOTS, contents, elsewhere, job_mapping
from tests.servers import KafkaServer

ROOT = Path(__file__).resolve().parents[3]
BACKENDS = {
    "changelog": ("kafka-changelog",),
    "blobs": ("blob-store",),
    "dual": DUAL,
    "segments": ("blob-store",),
}
LONG = pytest.mark.long
#: Kills that the quick runs leave out. A backend alone has the phases that both together have.
_REST = {"dual": LONG, "segments": LONG, "changelog": pytest.mark.heavy, "blobs": pytest.mark.heavy}
#: The kills of `make test`: the phases around each change of durable state. The long tests kill at every phase.
COMMIT_KILLS = {
    ("dual", Phase.UPLOAD),
    ("dual", Phase.SEND_CHECKPOINT),
    ("dual", Phase.ACKNOWLEDGED),
    ("segments", Phase.PUT_SEGMENTS),
    ("segments", Phase.MATERIALIZED),
    ("segments", Phase.DELETE_BLOBS),
}
RESTORE_KILLS = {
    ("changelog", Phase.REPLAY),
    ("blobs", Phase.FETCH),
    ("blobs", Phase.SWAP),
    ("segments", Phase.APPLY_SEGMENTS),
}
COMMIT_PHASES = (
    Phase.FLUSH,
    Phase.CHECKPOINT_DIR,
    Phase.DIFF,
    Phase.UPLOAD,
    Phase.PUT_INDEX,
    Phase.PUT_SEGMENTS,
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
    Phase.MATERIALIZE,
    Phase.MATERIALIZED,
)
RESTORE_PHASES = (
    Phase.FENCE,
    Phase.READ_TOPIC,
    Phase.PLAN,
    Phase.GET_INDEX,
    Phase.FETCH,
    Phase.REPLAY,
    Phase.APPLY_SEGMENTS,
    Phase.VERIFY,
    Phase.SWAP,
    Phase.OPEN,
)
BLOB_ONLY = {Phase.DIFF, Phase.UPLOAD, Phase.PUT_INDEX, Phase.DELETE_INDEX, Phase.GET_INDEX, Phase.FETCH, Phase.VERIFY}
CHANGELOG_ONLY = {Phase.REPLAY}
SEGMENTS_ONLY = {Phase.PUT_SEGMENTS, Phase.MATERIALIZE, Phase.MATERIALIZED, Phase.APPLY_SEGMENTS}
#: With segments, only the first commit and the background snapshots run these phases.
BESIDE = {Phase.DIFF, Phase.UPLOAD, Phase.PUT_INDEX, Phase.MATERIALIZE, Phase.MATERIALIZED}


def start(
    config: Mapping[str, object],
    commits: int,
    phase: Phase | None = None,
    occurrence: int = 1,
    ahead: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child that makes ``commits`` commits, or dies at a phase. It stores ahead once it has ``ahead`` bytes."""
    order = {"config": config, "commits": commits, "phase": phase, "occurrence": occurrence, "ahead": ahead}
    return subprocess.Popen([sys.executable, "-m", "tests.core.crash.child", json.dumps(order)], cwd=ROOT)


def check_exact(config: JobConfig, directory: Path, at_least: int, at_most: int) -> int:
    """Check the state against the oracle. Return the number of published commits."""
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


def applies(phase: Phase, backends: str) -> bool:
    """Return whether a set of backends has the phase."""
    if phase in SEGMENTS_ONLY:
        return backends == "segments"
    if phase is Phase.CHECKPOINT_DIR and backends in ("changelog", "segments"):
        return False  # their commits make no checkpoint directory
    return not (phase in BLOB_ONLY and backends == "changelog") and not (
        phase in CHANGELOG_ONLY and backends in ("blobs", "segments")
    )


def mapping_of(kafka: KafkaServer, directory: Path, backends: str, **more: object) -> dict[str, object]:
    """Return a job with these backends. Where commits are segments, each one also starts a background snapshot."""
    interval = ["1 B"] if backends == "segments" else INTERVALS[SNAPSHOTS]
    return job_mapping(
        kafka,
        directory,
        backup=BACKENDS[backends],
        stores=STORES,
        task__commit__snapshot__interval=interval,
        **more,  # type: ignore[arg-type]
    )


def occurrence_of(phase: Phase, backends: str) -> int:
    """Return the occurrence of a phase in the third commit, or, in background snapshots, the one after the first."""
    per_store = len(STORES) if phase in _PER_STORE else 1
    if backends == "segments" and phase in BESIDE:
        return (0 if phase in SEGMENTS_ONLY else per_store) + 1
    if backends == "segments" and phase in (Phase.PUT_SEGMENTS, Phase.DELETE_INDEX):
        return 1
    return 2 * per_store + 1


@pytest.mark.parametrize(
    ("backends", "phase"),
    [
        pytest.param(b, p, id=f"{b}-{p}", marks=() if (b, p) in COMMIT_KILLS else _REST[b])
        for b in BACKENDS
        for p in COMMIT_PHASES
        if applies(p, b)
    ],
)
def test_killed_in_a_commit(kafka: KafkaServer, tmp_path: Path, backends: str, phase: Phase) -> None:
    """FAULTS 1, 2, 3, 5 and A41: after a kill in the third commit, the state is that of the second or the third."""
    mapping = mapping_of(kafka, tmp_path, backends, task__checkpoint__retained=1)
    # the job may need several commits to take up a background snapshot and clean up after it
    most = 40 if backends == "segments" else 5
    child = start(mapping, most, phase, occurrence_of(phase, backends))
    assert child.wait(60) == -signal.SIGKILL
    config = JobConfig.from_mapping(mapping)
    done = check_exact(config, tmp_path, 1, most - 1)
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
    [
        pytest.param(b, p, id=f"{b}-{p}", marks=() if (b, p) in RESTORE_KILLS else _REST[b])
        for b in ("changelog", "blobs", "segments")
        for p in RESTORE_PHASES
        if applies(p, b)
    ],
)
def test_killed_in_a_restore(kafka: KafkaServer, tmp_path: Path, backends: str, phase: Phase) -> None:
    """FAULT 7: after a kill during a restore on another machine, the next restore there is complete."""
    mapping = mapping_of(kafka, tmp_path, backends)
    if backends == "segments":
        mapping["task.commit.snapshot.interval"] = ["100 commits"]
    assert start(mapping, 2).wait(60) == 0
    moved = {**mapping, "state.dir": str(tmp_path / "moved")}
    child = start(moved, 3, phase)
    assert child.wait(60) == -signal.SIGKILL
    check_exact(JobConfig.from_mapping(moved), tmp_path, 2, 2)


@LONG
@pytest.mark.parametrize("backends", ["segments", "dual"])
def test_killed_at_random_moments(kafka: KafkaServer, tmp_path: Path, backends: str) -> None:
    """Ten random kills of one job never lose a commit and never leave a state between two commits.

    With segments, the job stores some changes of each commit ahead of it.
    """
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    print(f"seed {seed}")
    mapping = mapping_of(kafka, tmp_path, backends, **{f"stores.{store}.write.batch.size": 5 for store in STORES})
    config = JobConfig.from_mapping(mapping)
    done, most_s, round_number = 0, 2.5, 0
    while round_number < 10 or not done:
        child = start(mapping, 10_000, ahead=2_000)
        time.sleep(1.0 + draw.random() * (most_s - 1.0))
        child.kill()
        child.wait(30)
        done = check_exact(config, tmp_path / str(round_number), done, 10_000)
        most_s *= 1 if done else 2  # a busy machine takes longer to reach the first commit
        round_number += 1
