"""Compression at rest: jobs that compress, start to compress and stop again, on a real broker and S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.blobs import open_blob_store
from statemgr.local.machine import SystemClock
from statemgr.ports import list_blobs
from statemgr.reader import JobReader
from statemgr.terminal.render import index_to_json_dict
from tests.commits import TASK, Items, write
from tests.jobs import SEGMENTS, SNAPSHOTS, contents, elsewhere, job_mapping, with_changes
from tests.servers import KafkaServer, S3Server


def values(begin: int) -> Items:
    """Keys with values that compress well."""
    return {b"%06d" % number: b"the same words again and again " * 30 for number in range(begin, begin + 3_000)}


def commit(config: JobConfig, items: Items, offset: int) -> None:
    """Commit complete states, whatever the backend."""
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, items)
        task.commit({"orders-0": offset}, materialize=True)


def stored(config: JobConfig) -> int:
    """Bytes of all of a job's blobs."""
    store = open_blob_store(config, SystemClock())
    total = sum(info.size for info in list_blobs(store, f"{config.job_name}/"))
    store.close()
    return total


@pytest.mark.long
@pytest.mark.parametrize("kind", [SNAPSHOTS, SEGMENTS])
def test_compression_comes_and_goes(kafka: KafkaServer, s3: S3Server, tmp_path: Path, kind: str) -> None:
    """Issue 4, A.6: compression is recorded per blob, so that blobs stored either way are kept and restored
    together."""
    plain = JobConfig.from_mapping(
        job_mapping(
            kafka, tmp_path, s3=s3, backup=["blob-store"], kind=kind,
            stores__totals__rocksdb__compression="none", blob__store__s3__path__style=True,
        )
    )  # fmt: skip
    zstd = with_changes(plain, blob__store__compression="zstd")
    model: dict[bytes, bytes | None] = {}
    sizes: list[int] = []
    for number, config in enumerate([plain, zstd, plain]):
        items = values(3_000 * number)
        model.update(items)
        commit(config, items, number + 1)
        sizes.append(stored(config))
        # how a job stores does not affect what it can restore
        for other in (plain, zstd):
            back = elsewhere(other, tmp_path / f"restored-{number}-{other is zstd}", "blob-store")
            state, offsets = contents(back)
            assert (state["totals"], offsets) == (model, {"orders-0": number + 1})
    first, second, third = sizes[0], sizes[1] - sizes[0], sizes[2] - sizes[1]
    assert second < first / 5, "frames"
    assert third > first / 2, "no frames"
    with JobReader(plain) as reader:
        shown = index_to_json_dict(reader.index(TASK, "totals", None))
    parts = [part for file in shown["files"] for part in file["parts"]]
    assert any("zstd_size" in part for part in parts)
    assert any("zstd_size" not in part for part in parts)
