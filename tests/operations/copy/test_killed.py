"""``statemgr copy`` killed with SIGKILL at every phase.

Oracle: before the publish, the new job has no checkpoint and only blobs with a TTL, and a second run of the command
reuses the copied blobs. After the publish, the new job has the state, and its first opening removes the TTLs.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.phases import Phase
from tests.cli.test_running_job import write_toml
from tests.commits import commit, current
from tests.core.crash.test_kill import ROOT, check_blobs
from tests.jobs import DUAL, SEGMENTS, SNAPSHOTS, contents, elsewhere, job_mapping, with_changes
from tests.servers import KafkaServer, S3Server

#: The phases at which the process dies, each with the occurrence that kills it.
STEPS = [
    (Phase.FENCE, 1),
    (Phase.READ_TOPIC, 1),
    (Phase.COPY_BLOB, 1),
    (Phase.COPY_BLOB, 3),
    (Phase.PUT_INDEX, 1),
    (Phase.SWAP, 1),
    (Phase.PREPARED, 1),
    (Phase.BEGIN, 1),
    (Phase.SEND_CHANGELOG, 1),
    (Phase.SEND_CHECKPOINT, 1),
    (Phase.COMMIT_TRANSACTION, 1),
    (Phase.ACKNOWLEDGED, 1),
]
#: Kinds of commits and blob stores, and the run that has those which are not quick.
WAYS = {
    (SNAPSHOTS, "s3"): pytest.mark.long,
    (SEGMENTS, "file"): pytest.mark.long,
    (SNAPSHOTS, "file"): pytest.mark.heavy,
    (SEGMENTS, "s3"): pytest.mark.heavy,
}
QUICK = [
    ((Phase.COMMIT_TRANSACTION, 1), (SEGMENTS, "file")),
    ((Phase.ACKNOWLEDGED, 1), (SNAPSHOTS, "s3")),
]


@pytest.mark.parametrize(
    ("phase", "number", "kind", "on"),
    [
        pytest.param(*step, *way, marks=() if (step, way) in QUICK else rest)
        for step in STEPS
        for way, rest in WAYS.items()
    ],
)
def test_killed_in_a_copy(
    kafka: KafkaServer, s3: S3Server, tmp_path: Path, phase: Phase, number: int, kind: str, on: str
) -> None:
    """After a kill at any phase, a second run copies the blobs and fills the changelog exactly once."""
    mapping = job_mapping(kafka, tmp_path, backup=("blob-store",), kind=kind, s3=s3 if on == "s3" else None)
    source = JobConfig.from_mapping(mapping)
    rows = random.Random(2)
    state = {b"key-%05d" % row: rows.randbytes(200) for row in range(3000)}
    commit(source, state, 1)
    for commits in (2, 3):
        changed = {b"key-%05d" % (commits * 100 + row): rows.randbytes(200) for row in range(50)}
        commit(source, changed, commits)
        state |= changed
    target = with_changes(
        source, job__name=f"{source.job_name}-new", state__dir=str(tmp_path / "new"), task__backup__factories=list(DUAL)
    )
    write_toml(source, tmp_path / "job.toml")
    write_toml(target, tmp_path / "new.toml")
    arguments = ["copy", "--config", str(tmp_path / "job.toml"), "--to", str(tmp_path / "new.toml"), "--write"]
    order = json.dumps({"arguments": arguments, "phase": phase, "number": number})
    killed = subprocess.run([sys.executable, "-m", "tests.core.crash.command_child", order], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    again = subprocess.run(
        [sys.executable, "-m", "statemgr", *arguments, "--json"],
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if phase is Phase.ACKNOWLEDGED:
        assert again.returncode == 2
        assert "is not new" in again.stderr
    else:
        assert again.returncode == 0, again.stderr
        moved = json.loads(again.stdout)["blobs"]
        if phase is not Phase.COPY_BLOB:  # several workers copy the first blobs at the same time
            assert (moved["found"] > 0) == (phase not in (Phase.FENCE, Phase.READ_TOPIC))
    with StateManager(target) as manager:  # the first opening removes the remaining TTLs
        task = manager.open_task("Partition 0")
        task.store("totals").put(b"after", b"1")
        task.commit({"orders-0": 4})
    record = current(target)
    assert record is not None
    assert len(record.checkpoints) == 2, "the copy was published once"
    for factory in DUAL:
        there = elsewhere(target, tmp_path / f"there-{factory}", factory)
        assert contents(there) == ({"totals": state | {b"after": b"1"}}, {"orders-0": 4})
    check_blobs(target)
