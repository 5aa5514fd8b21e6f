"""backup: when a commit to blob-store stores a segment of changes, and when it stores a snapshot. Needs no broker."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import Checkpoint
from statemgr.services import Services
from statemgr.stores.open_store import OpenStore
from statemgr.wiring import open_services
from tests.segment_tasks import FACTORY, STORE, SegmentTask, config_of

KEYS = [random.Random(number).randbytes(500) for number in range(4000)]


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    """The services of a job with one store."""
    made = open_services(config_of(tmp_path))
    yield made
    made.close()


def chain_of(services: Services, task: SegmentTask, checkpoint: Checkpoint) -> SegmentChain:
    """Return the chain that a checkpoint's marker names."""
    identity, marker = services.identity(task.name, STORE), checkpoint.marker(FACTORY, STORE)
    return services.backup_manager(FACTORY)._catalogue.chain(identity, marker)  # type: ignore[attr-defined]


def test_more_changes_than_new_files_are_stored_as_a_snapshot(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1: a commit that deletes every key stores an empty snapshot, because a segment of all keys would be larger."""
    monkeypatch.setattr("statemgr.stores.open_store.MUCH", 1024 * 1024)
    task = SegmentTask(services, 0)
    first = chain_of(services, task, task.commit(dict.fromkeys(KEYS, b"")))
    # the snapshot's new file would have as many bytes as the changes, or more: a segment
    few = chain_of(services, task, task.commit(dict.fromkeys(KEYS[:10], b"few")))
    many = chain_of(services, task, task.commit({key[::-1]: b"" for key in KEYS}))
    assert [len(chain.segments) for chain in (first, few, many)] == [0, 1, 2]
    emptied = chain_of(services, task, task.commit(dict.fromkeys([*KEYS, *(key[::-1] for key in KEYS)])))
    assert emptied.segments == ()
    assert (emptied.lineage, emptied.end) == (first.lineage, 4000 + 10 + 4000 + 8000)
    # the next commit is a segment after that snapshot
    last = chain_of(services, task, task.commit())
    assert (last.snapshot, len(last.segments)) == (emptied.snapshot, 1)
    task.close()


@pytest.mark.parametrize("first", [False, True])
def test_changes_before_the_first_commit_are_recorded_where_they_are_needed(services: Services, first: bool) -> None:
    """A backend that starts from a directory does not need the first changes. All later changes are recorded."""
    identity, config = services.identity("Partition 0", STORE), services.config.stores[STORE]
    store = OpenStore(services, identity, config, None, None, track_changes=True, track_first=first)
    assert store.changes_are_whole == first
    store.content.write([(b"a", b"1"), (b"b", b"1")])
    frozen = store.freeze("first", snapshot=False)
    store.content.write([(b"c", b"1")])
    assert frozen.changes is not None
    assert frozen.changes.count == (2 if first else 0)
    # if the first commit fails, the next commit carries its changes, or no segment has them
    again = store.freeze("again", snapshot=False).changes
    assert again is not None
    assert again.count == (3 if first else 1)
    store.close()
