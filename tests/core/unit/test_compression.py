"""Parts of files as zstandard frames: which parts are compressed, what a fetch returns, and which frames are wrong."""

from __future__ import annotations

import random
import resource
import secrets
import signal
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from statemgr.blobs.retrying import RetryingBlobStore
from statemgr.config import JobConfig
from statemgr.errors import CorruptBlob, DiskFull, UnavailableError
from statemgr.local.machine import Threads
from statemgr.model.hashing import content_hash
from statemgr.model.snapshot import FileIndex
from statemgr.ports import list_blobs
from statemgr.transfer.compression import FrameReader
from statemgr.transfer.downloads import Fetch
from statemgr.transfer.transfer import Transfer, Upload
from tests.blob_faults import FaultyBlobStore, ManualClock, read

PART = 100_000


@pytest.fixture
def blobs() -> FaultyBlobStore:
    """A blob store that fails when a test asks it to."""
    return FaultyBlobStore()


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The directory for frames."""
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def new(directory: Path) -> Callable[[], Path]:
    """Return a function that gives the paths of new files."""
    return lambda: directory / secrets.token_hex(8)


@pytest.fixture
def transfer(blobs: FaultyBlobStore, scratch: Path) -> Iterator[Transfer]:
    """An engine that compresses."""
    engine = Transfer(
        blobs, ManualClock(), Threads(), parallelism=4, part_size=PART, ttl_days=30, compress_in=new(scratch)
    )
    yield engine
    engine.close()


def upload(transfer: Transfer, tmp_path: Path, data: bytes) -> FileIndex:
    """Upload a file with this content."""
    path = tmp_path / "f.sst"
    path.write_bytes(data)
    [file] = transfer.upload_files([Upload(path, len(data), content_hash(data), "j/1/Partition_0/s/a/f.sst")])
    return file


def words(size: int) -> bytes:
    """Return bytes that compress well."""
    return (b"a line of a log, and another one; " * (size // 34 + 1))[:size]


def noise(size: int) -> bytes:
    """Return bytes that do not compress."""
    return random.Random(1).randbytes(size)


def test_each_part_is_compressed_where_that_is_worth_it(
    transfer: Transfer, blobs: FaultyBlobStore, scratch: Path, tmp_path: Path
) -> None:
    """Issue 4, A.6: a part that compresses well is one frame with its size; other parts are stored unchanged."""
    data = words(PART) + noise(PART) + words(PART // 2) + noise(PART // 2) + b"!" * 7
    file = upload(transfer, tmp_path, data)
    assert [bool(frame) for frame in file.frames] == [True, False, True]
    offset = 0
    for (part, stored), frame in zip(file.stored(), file.frames, strict=True):
        blob, content = read(blobs, part.blob_id), data[offset : offset + part.size]
        assert len(blob) == stored
        if frame:
            assert zstandard.get_frame_parameters(blob).content_size == part.size
            assert stored <= 0.9 * part.size
            blob = zstandard.decompress(blob)
        assert blob == content
        offset += part.size
    assert all(info.expires_ms is not None for info in list_blobs(blobs, "")), "uploads bear the TTL"
    assert list(scratch.iterdir()) == []
    transfer.fetch_files([Fetch(file, tmp_path / "back")])
    assert (tmp_path / "back").read_bytes() == data


@pytest.mark.parametrize("data", [b"", b"x", noise(3 * PART), noise(200) + words(100)], ids=len)
def test_what_is_not_worth_it_is_stored_as_it_is(
    transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path, data: bytes
) -> None:
    """A file without a compressed part is not marked as compressed."""
    file = upload(transfer, tmp_path, data)
    if file.frames:
        assert sum(stored for _, stored in file.stored()) < len(data)
    else:
        assert b"".join(read(blobs, part.blob_id) for part in file.parts) == data
    transfer.fetch_files([Fetch(file, tmp_path / "back")])
    assert (tmp_path / "back").read_bytes() == data


def test_a_sample_that_deceives_costs_no_room(blobs: FaultyBlobStore, scratch: Path, tmp_path: Path) -> None:
    """A part that starts with text but is mostly random is stored unchanged, and its frame is deleted."""
    big = Transfer(
        blobs, ManualClock(), Threads(), parallelism=1, part_size=1 << 30, ttl_days=1, compress_in=new(scratch)
    )
    assert upload(big, tmp_path, words(1 << 20) + noise(15 << 20)).frames == ()
    assert list(scratch.iterdir()) == []
    big.close()


def other(data: bytes) -> bytes:
    """Return a valid frame of other content of the same size."""
    return zstandard.compress(b"?" * len(zstandard.decompress(data)))


def bomb(data: bytes) -> bytes:
    """Return a frame that expands to far more content."""
    return zstandard.compress(b"\0" * (64 << 20))


def wide(data: bytes) -> bytes:
    """Return a frame of the right content whose reader needs 16 MiB of memory."""
    parameters = zstandard.ZstdCompressionParameters(window_log=24, write_content_size=0)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return frame.compress(zstandard.decompress(data)) + frame.flush()


@pytest.mark.parametrize(
    "alter",
    [
        lambda d: d[:-1],
        lambda d: b"",
        lambda d: b"x" * len(d),
        lambda d: d[:50] + b"xxxx" + d[54:],
        other,
        bomb,
        wide,
    ],
    ids=["cut", "empty", "no frame", "altered", "other content", "bomb", "wide window"],
)
def test_a_wrong_frame_is_found_and_named(
    transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path, alter: Callable[[bytes], bytes]
) -> None:
    """FAULTS 11 and 12: after a second try, CorruptBlob names the blob."""
    file = upload(transfer, tmp_path, words(3 * PART))
    bad = file.parts[1].blob_id
    blobs.altered[bad] = alter
    with pytest.raises(CorruptBlob, match=bad):
        transfer.fetch_files([Fetch(file, tmp_path / "back")])
    assert blobs.calls.count(("get", bad)) == 2


def test_a_frame_that_is_whole_at_the_second_try(transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path) -> None:
    """FAULTS 12: a damaged frame is fetched a second time, and the file is then correct."""
    data = words(3 * PART)
    file = upload(transfer, tmp_path, data)
    tries: list[int] = []

    def once(content: bytes) -> bytes:
        tries.append(1)
        return content[: len(content) // 2] if len(tries) == 1 else content

    blobs.altered[file.parts[1].blob_id] = once
    transfer.fetch_files([Fetch(file, tmp_path / "back")])
    assert (tmp_path / "back").read_bytes() == data
    assert len(tries) == 2


def test_an_interrupted_fetch_goes_on(transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path) -> None:
    """B.2: a continued fetch checks the parts that are already local by their content and does not fetch them again."""
    data = words(3 * PART)
    file = upload(transfer, tmp_path, data)
    (tmp_path / "back").write_bytes(data[: 2 * PART] + b"\0" * PART)
    blobs.calls.clear()
    assert transfer.fetch_files([Fetch(file, tmp_path / "back", continued=True)]) == 2 * PART
    assert (tmp_path / "back").read_bytes() == data
    assert [blob for method, blob in blobs.calls if method == "get"] == [file.parts[2].blob_id]


def test_frames_of_another_file_are_found(transfer: Transfer, tmp_path: Path) -> None:
    """A28: an index that confuses frames with plain parts, or has a wrong frame size, restores nothing."""
    file = upload(transfer, tmp_path, words(PART) + noise(PART))
    for frames in [(), file.frames[::-1], (file.frames[0] - 1, 0)]:
        with pytest.raises(CorruptBlob):
            transfer.fetch_files([Fetch(replace(file, frames=frames), tmp_path / f"back{frames}")])


def test_a_full_disk_is_said_to_be(transfer: Transfer, tmp_path: Path, scratch: Path) -> None:
    """FAULTS 24: no room for a frame raises DiskFull and leaves no files. The test limits file sizes instead."""
    path = tmp_path / "f.sst"
    path.write_bytes(words(PART))
    whole = Upload(path, PART, content_hash(words(PART)), "j/1/Partition_0/s/a/f.sst")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(DiskFull):
            transfer.upload_files([whole])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(scratch.iterdir()) == []


def test_a_reader_is_gone_when_it_was_read(transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path) -> None:
    """Invariant 13: each part in progress takes one memory window, which is freed after the read."""
    file = upload(transfer, tmp_path, words(PART))
    with blobs.get(file.parts[0].blob_id) as blob:
        made = FrameReader(blob)
        assert made.readinto(memoryview(bytearray(PART))) == PART
        kept = weakref.ref(made)
        del made
    assert kept() is None


def test_a_get_that_breaks_off_is_taken_up(blobs: FaultyBlobStore, scratch: Path, tmp_path: Path) -> None:
    """FAULTS 9: a GET that breaks off in a frame continues there, and the content is correct."""
    retry = JobConfig.from_mapping({"job.name": "orders"}).retry
    engine = Transfer(
        RetryingBlobStore(blobs, retry, ManualClock()), ManualClock(), Threads(),
        parallelism=1, part_size=PART, ttl_days=30, compress_in=new(scratch),
    )  # fmt: skip
    data = b"".join(b"%d" % (number * number) for number in range(20_000))
    file = upload(engine, tmp_path, data)
    assert all(file.frames)
    blobs.breaks = [1_000, 5_000, None]
    engine.fetch_files([Fetch(file, tmp_path / "back")])
    engine.close()
    assert (tmp_path / "back").read_bytes() == data
    assert blobs.breaks == []


def test_a_failed_upload_leaves_no_frame(
    transfer: Transfer, blobs: FaultyBlobStore, scratch: Path, tmp_path: Path
) -> None:
    """A failed upload deletes its frames."""
    blobs.faults["put"] = [None, UnavailableError("away")]
    with pytest.raises(UnavailableError, match="away"):
        upload(transfer, tmp_path, words(5 * PART))
    assert list(scratch.iterdir()) == []
