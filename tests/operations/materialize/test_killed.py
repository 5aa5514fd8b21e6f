"""`statemgr materialize` killed with SIGKILL at every phase.

The next run continues, the owner adopts the offer, and the state is exactly that of the changelog.
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
from statemgr.operations.materialize.tasks import materialize_task
from statemgr.phases import Phase
from tests.commits import TASK, blob_files, commit, current, referenced, totals
from tests.offers import BLOBS, CHANGELOG, offers, stage_one, stage_two
from tests.servers import KafkaServer

ROOT = Path(__file__).resolve().parents[3]
RANDOM = random.Random(5)
ROWS: dict[bytes, bytes | None] = {b"key-%05d" % number: RANDOM.randbytes(300) for number in range(5000)}
GONE: dict[bytes, bytes | None] = dict.fromkeys(list(ROWS)[::7])
#: The points at which the process dies, each with the occurrence that kills it.
POINTS = [
    (Phase.MATERIALIZE.value, 1),
    ("replay", 1),
    ("replay", 6),
    (Phase.UPLOAD.value, 1),
    ("upload", 10),
    (Phase.PUT_INDEX.value, 1),
    (Phase.OFFER.value, 1),
    (Phase.MATERIALIZED.value, 1),
]
#: Those of `make test`: in the replay, in the upload, and before the offer.
QUICK = [("replay", 6), ("upload", 10), (Phase.OFFER.value, 1)]


def killed(config: JobConfig, point: str, number: int) -> None:
    """Materialize in a process that kills itself."""
    order = [point, str(number), json.dumps(config.to_mapping())]
    child = subprocess.run(
        [sys.executable, "-m", "tests.operations.materialize.child", *order],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr


@pytest.mark.parametrize(
    ("point", "number"),
    [pytest.param(*at, id=f"{at[0]}-{at[1]}", marks=() if at in QUICK else pytest.mark.long) for at in POINTS],
)
def test_killed_while_it_materializes(kafka: KafkaServer, tmp_path: Path, point: str, number: int) -> None:
    """Only the offer counts. The next run does not repeat the replay and the upload, and the job commits in between."""
    config = stage_one(kafka, tmp_path)
    commit(config, ROWS, 1)
    commit(config, GONE, 2)
    killed(config, point, number)
    commit(config, {b"key-00007": b"back", b"key-00001": None}, 3)
    (done,) = materialize_task(config, TASK)
    assert len(offers(config)) == 1
    if point == Phase.MATERIALIZED.value:
        assert not done.offered
    else:
        assert done.offered
        continued = point not in (Phase.MATERIALIZE.value, "replay") or number > 1
        assert (done.records < 4000) == continued
    if point in (Phase.PUT_INDEX.value, Phase.OFFER.value, "upload"):
        assert done.uploaded < done.size * (0.9 if point == "upload" else 0.5)

    with StateManager(stage_two(config)) as manager, manager.open_task(TASK):
        pass
    record = current(config)
    assert record is not None
    assert record.current.marker(BLOBS, "totals") is not None
    found = totals(config, BLOBS)
    assert found == totals(config, CHANGELOG)
    assert len(found[TASK]) == len(ROWS) - len(GONE) - 1 + 1
    assert offers(config) == {}
    # the blobs that the killed process left expire
    assert blob_files(tmp_path, expiring=False) == referenced(stage_two(config))
