"""chain_restore: a blob of segments with damage anywhere is not restored. Needs no broker."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from statemgr.errors import CorruptBlob
from statemgr.local import open_store
from statemgr.model.checkpoint import BlobMarker
from statemgr.ports import RestoreRequest, no_progress
from statemgr.wiring import open_services
from tests.jobs import with_changes
from tests.segment_tasks import FACTORY, STORE, SegmentTask, config_of

#: A value that makes a segment too large to be inline.
BIG = random.Random(0).randbytes(2500)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_blob_of_segments_that_is_damaged_anywhere_is_refused(tmp_path: Path, damage: str) -> None:
    """B9, FAULT 12: a cut or a changed byte anywhere in the segment or the chain is an error that names the blob."""
    config = config_of(tmp_path, blob__store__retry__policy__max__retries=0)
    services = open_services(config)
    task = SegmentTask(services, 0)
    task.commit({b"before": b"1"})
    marker = task.commit({b"big": BIG, b"before": None}).marker(FACTORY, STORE)
    task.close()
    assert isinstance(marker, BlobMarker)
    assert marker.blob is not None
    path = tmp_path / "blobs" / marker.blob.blob_id
    data = path.read_bytes()
    damages: dict[str, Callable[[int], bytes]] = {
        "cut": lambda at: data[:at],
        "flipped": lambda at: data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :],
    }
    places = sorted({0, 1, *range(0, len(data), 101), *range(len(data) - 3, len(data))})
    for at in places:
        path.write_bytes(damages[damage](at))
        here = tmp_path / f"{at}"
        other = open_services(with_changes(config, state__dir=str(here)))
        request = RestoreRequest(other.identity(task.name, STORE), marker, here / "staging", (), no_progress)
        with pytest.raises(CorruptBlob) as caught:
            other.restore_manager(FACTORY).restore(request)
        assert caught.value.where["blob"] == marker.blob.blob_id
        other.close()
    path.write_bytes(data)
    request = RestoreRequest(services.identity(task.name, STORE), marker, tmp_path / "staging", (), no_progress)
    services.restore_manager(FACTORY).restore(request)
    opened = open_store("memory", tmp_path / "staging", {})
    assert dict(opened.scan(None, None)) == {b"big": BIG}
    opened.close()
    services.close()
