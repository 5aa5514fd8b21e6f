"""An adoption killed with SIGKILL at every phase.

The next run of the command continues it. The new job has exactly the old state, nothing is published twice, and the old
topics are unchanged.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from statemgr.phases import Phase
from tests.kafka_jobs import committed
from tests.old_jobs import Adopter, commit, ends, make, state, write
from tests.servers import KafkaServer

ROOT = Path(__file__).resolve().parents[2]
STATE = [{f"{task}-{n}".encode(): b"value %d" % n for n in range(1200)} for task in (0, 1)]
#: The phases at which the process dies, each with the occurrence that kills it.
STEPS = [
    (Phase.FENCE, 1),
    (Phase.COPY, 1),
    (Phase.COPIED, 1),
    (Phase.COPIED, 2),
    (Phase.COPY, 2),
    (Phase.READ_TOPIC, 1),
    (Phase.BEGIN, 1),
    (Phase.SEND_CHECKPOINT, 1),
    (Phase.COMMIT_TRANSACTION, 1),
    (Phase.ACKNOWLEDGED, 1),
]


@pytest.mark.parametrize(("phase", "number"), STEPS, ids=[f"{phase.value}-{number}" for phase, number in STEPS])
def test_killed_in_an_adoption(kafka: KafkaServer, tmp_path: Path, phase: Phase, number: int) -> None:
    """After a kill at any phase, one more run completes the adoption."""
    name = kafka.fresh_name("old")
    make(kafka, f"{name}-totals")
    make(kafka, f"{name}-in")
    for partition, of in enumerate(STATE):
        write(kafka, f"{name}-totals", partition, [(b"gone", b"1"), *((key, b"older") for key in of)])
        write(kafka, f"{name}-totals", partition, [*of.items(), (b"gone", None)])
    commit(kafka, name, {(f"{name}-in", 0): 0, (f"{name}-in", 1): 0})
    old = Adopter(kafka, tmp_path, "--from", "raw", "--job", name, "--changelog", f"totals={name}-totals")
    config = old.init(f"{name}-new")
    before = ends(kafka, f"{name}-totals")
    arguments = ["adopt", *old.old, "--config", str(old.file), "--settle", "0", "--write"]
    child = subprocess.run(
        [sys.executable, "-m", "tests.crash.adopt_child", phase.value, str(number), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    if phase is Phase.ACKNOWLEDGED:
        assert "has checkpoints already" in old.run("--write", status=2)
    else:
        old.run("--write")
    assert state(config) == ([{"totals": of} for of in STATE], [{f"{name}-in-{n}": 0} for n in (0, 1)])
    assert ends(kafka, f"{name}-totals") == before
    for partition, of in enumerate(STATE):
        records = committed(config, config.stores["totals"].changelog_topic, partition)
        assert len(records) == 2 * len(of) + 2
