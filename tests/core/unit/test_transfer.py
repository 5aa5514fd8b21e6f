"""The transfer engine: parts, hashes, errors and limits."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from statemgr import JobConfig
from statemgr.errors import (
    AccessDenied,
    ConfigError,
    CorruptBlob,
    CorruptError,
    CorruptFile,
    DiskFull,
    InvalidError,
    MissingBlob,
    RetryableError,
    UnavailableError,
)
from statemgr.local.machine import SystemClock, Threads
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash, hasher
from statemgr.model.snapshot import FileIndex
from statemgr.ports import Body, FileSlice, list_blobs
from statemgr.transfer.downloads import Fetch
from statemgr.transfer.transfer import Transfer, Upload, cut
from tests.blob_faults import FaultyBlobStore, read

PART = 1_000
#: Number of parts of a file whose transfer ends early. A busy machine may delay the thread that fails.
_MANY = 5_000


@pytest.fixture
def blobs() -> FaultyBlobStore:
    """A blob store that fails when a test asks it to."""
    return FaultyBlobStore()


@pytest.fixture
def transfer(blobs: FaultyBlobStore) -> Iterator[Transfer]:
    """An engine with small parts."""
    engine = Transfer(blobs, SystemClock(), Threads(), parallelism=4, part_size=PART, ttl_days=30)
    yield engine
    engine.close()


def source(tmp_path: Path, name: str, data: bytes) -> Upload:
    """Return a local file to upload."""
    path = tmp_path / name
    path.write_bytes(data)
    return Upload(path, len(data), content_hash(data), f"j/1/Partition_0/s/a/{name}")


def noise(size: int, seed: int = 1) -> bytes:
    """Return random bytes."""
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 10 * PART, 10 * PART + 7])
def test_a_file_in_parts_comes_back(transfer: Transfer, tmp_path: Path, size: int) -> None:
    """A27: a file in many parts comes back complete and in order."""
    data = noise(size)
    [file] = transfer.upload_files([source(tmp_path, "f.sst", data)])
    # a small remainder goes with the last part
    full, rest = divmod(size, PART)
    sizes = [*[PART] * (full - 1), PART + rest] if full else [size] * bool(size)
    assert [part.size for part in file.parts] == sizes
    assert [part.blob_id for part in file.parts] == [f"j/1/Partition_0/s/a/f.sst.{n}" for n in range(len(file.parts))]
    transfer.fetch_files([Fetch(file, tmp_path / "back")])
    assert (tmp_path / "back").read_bytes() == data


def test_no_part_is_larger_than_an_object_of_s3() -> None:
    """The last part takes a rest of up to a quarter more, and an object of one PUT has at most 5 GiB."""
    most = 4 << 30
    assert JobConfig.from_mapping({"job.name": "j", "blob.store.part.size": most}).part_size == most
    with pytest.raises(ConfigError):
        JobConfig.from_mapping({"job.name": "j", "blob.store.part.size": most + 1})
    assert max(length for _, length in cut(9 << 30, most)) == 5 << 30


def test_many_files_at_once(transfer: Transfer, tmp_path: Path) -> None:
    """FAULTS 32: files come back in order, even with more parts than threads and window."""
    uploads = [source(tmp_path, f"f{n}", noise(n * 333, n)) for n in range(60)]
    files = transfer.upload_files(uploads)
    assert [file.name for file in files] == [f"f{n}" for n in range(60)]
    transfer.fetch_files([Fetch(file, tmp_path / f"back{n}") for n, file in enumerate(files)])
    for n, upload in enumerate(uploads):
        assert (tmp_path / f"back{n}").read_bytes() == upload.path.read_bytes()


def test_uploads_bear_the_ttl(transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path) -> None:
    """Every upload has a TTL, which is removed later."""
    transfer.upload_files([source(tmp_path, "f", noise(3 * PART))])
    transfer.put("j/x", b"x")
    assert all(info.expires_ms is not None for info in list_blobs(blobs, ""))
    assert transfer.remove_ttl_all(info.blob_id for info in list_blobs(blobs, "")) == {}
    assert all(info.expires_ms is None for info in list_blobs(blobs, ""))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("compress", [False, True])
def test_a_file_that_changes_after_it_was_hashed(tmp_path: Path, parts: int, compress: bool) -> None:
    """Invariant 2: the bytes that are sent are compared, too, whether they are sent as they are or compressed."""
    upload = source(tmp_path, "f", bytes(parts * PART))

    def damage() -> None:
        with open(upload.path, "r+b") as file:
            file.write(b"!")

    def scratch() -> Path:
        damage()
        return tmp_path / str(random.random())

    class Changing(FaultyBlobStore):
        def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
            damage()
            super().put(blob_id, body, ttl_days=ttl_days)

    blobs = Changing()
    in_scratch = scratch if compress else None
    engine = Transfer(
        blobs, SystemClock(), Threads(), parallelism=2, part_size=PART, ttl_days=30, compress_in=in_scratch
    )
    with closing(engine):
        with pytest.raises(CorruptFile, match="changed"):
            engine.upload_files([upload])
        upload.path.write_bytes(bytes(PART))
        with pytest.raises(CorruptFile, match="changed"):
            engine.put("j/1/whole", FileSlice(upload.path, 0, PART))
    assert not {"j/1/Partition_0/s/a/f.0", "j/1/whole"} & {info.blob_id for info in list_blobs(blobs, "")}


def test_progress_is_told(transfer: Transfer, tmp_path: Path) -> None:
    """Progress ends at the total and never exceeds it."""
    told: list[tuple[str, int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        told.append((what, done, total))

    [file] = transfer.upload_files([source(tmp_path, "f", noise(9 * PART))], progress)
    transfer.fetch_files([Fetch(file, tmp_path / "back")], progress)
    assert ("upload", 9 * PART, 9 * PART) in told
    assert told[-1] == ("fetch", 9 * PART, 9 * PART)
    assert all(done <= total for _, done, total in told)


def test_a_file_that_changed_since_is_refused(transfer: Transfer, tmp_path: Path) -> None:
    """Invariant 2: a local file that differs from the hash taken at the commit never becomes part of a snapshot."""
    upload = source(tmp_path, "f", noise(2 * PART))
    changed = bytearray(upload.path.read_bytes())
    changed[PART + 5] ^= 1
    upload.path.write_bytes(changed)
    with pytest.raises(CorruptError, match="has changed since"):
        transfer.upload_files([upload])
    for number, data in enumerate((changed[:-1], changed + b"x")):
        upload = replace(upload, blob_prefix=f"j/1/other-{number}")
        upload.path.write_bytes(data)
        with pytest.raises(CorruptError):
            transfer.upload_files([upload])
    upload.path.unlink()
    with pytest.raises(CorruptError):
        transfer.upload_files([upload])


def flip(data: bytes) -> bytes:
    """Flip one bit."""
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("alter", [flip, lambda d: d[:-1], lambda d: d + b"x", lambda d: b"", lambda d: d * 1000])
def test_a_corrupt_part_is_found_and_named(
    transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path, alter: object
) -> None:
    """FAULTS 11 and 12: a part with other, fewer or more bytes is fetched again, and then CorruptBlob names it."""
    [file] = transfer.upload_files([source(tmp_path, "f", noise(3 * PART))])
    bad = file.parts[1].blob_id
    blobs.altered[bad] = alter  # type: ignore[assignment]
    with pytest.raises(CorruptBlob, match=bad):
        transfer.fetch_files([Fetch(file, tmp_path / "back")])
    assert blobs.calls.count(("get", bad)) == 2


def test_a_part_that_is_whole_at_the_second_try(transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path) -> None:
    """FAULTS 12: after a hash mismatch the part is fetched a second time, and the file is correct."""
    data = noise(3 * PART)
    [file] = transfer.upload_files([source(tmp_path, "f", data)])
    bad = file.parts[1].blob_id
    tries: list[int] = []

    def once(content: bytes) -> bytes:
        tries.append(1)
        return content + b"more" if len(tries) == 1 else content

    blobs.altered[bad] = once
    told: list[int] = []
    transfer.fetch_files([Fetch(file, tmp_path / "back")], lambda _, done, total: told.append(done))
    assert (tmp_path / "back").read_bytes() == data
    assert (len(tries), told[-1]) == (2, 3 * PART)


def test_parts_in_another_order_are_found(transfer: Transfer, tmp_path: Path) -> None:
    """A28: parts that are correct but in the wrong order are not the file."""
    [file] = transfer.upload_files([source(tmp_path, "f", noise(2 * PART))])
    swapped = FileIndex(file.name, file.size, file.hash, parts=file.parts[::-1])
    with pytest.raises(CorruptBlob, match="together"):
        transfer.fetch_files([Fetch(swapped, tmp_path / "back")])


def test_a_single_part_of_another_file_is_found(transfer: Transfer, tmp_path: Path) -> None:
    """A28: a correct single part of another file is refused."""
    [file] = transfer.upload_files([source(tmp_path, "f", noise(PART))])
    foreign = FileIndex(file.name, file.size, b"\0" * 16, parts=file.parts)
    with pytest.raises(CorruptBlob):
        transfer.fetch_files([Fetch(foreign, tmp_path / "back")])


@pytest.mark.parametrize("error", [UnavailableError("503"), AccessDenied("403"), DiskFull("full")])
def test_the_first_error_ends_an_upload(
    transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path, error: Exception
) -> None:
    """A30: a part's error is raised unchanged, the other parts are dropped, and nothing continues to run."""
    blobs.faults["put"] = [None] * 5 + [error]
    with pytest.raises(type(error)):
        transfer.upload_files([source(tmp_path, "f", noise(_MANY * PART))])
    calls = blobs.count("put")
    assert calls < _MANY
    assert threading.Event().wait(0.05) is False
    assert blobs.count("put") == calls


def test_the_first_error_ends_a_fetch(transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path) -> None:
    """FAULTS 13, A30: a missing part raises MissingBlob with its name, and the other parts are dropped."""
    [file] = transfer.upload_files([source(tmp_path, "f", noise(_MANY * PART))])
    blobs.delete(file.parts[3].blob_id)
    with pytest.raises(MissingBlob, match=r"f\.3\b"):
        transfer.fetch_files([Fetch(file, tmp_path / "back")])
    assert blobs.count("get") < _MANY


def test_the_engine_works_on_after_an_error(transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path) -> None:
    """FAULTS 6: the engine can be used after a failed transfer."""
    blobs.faults["put"] = [UnavailableError("503")]
    with pytest.raises(UnavailableError):
        transfer.upload_files([source(tmp_path, "f", noise(50 * PART))])
    blobs.faults.clear()
    upload = source(tmp_path, "g", noise(50 * PART))
    [file] = transfer.upload_files([upload])
    transfer.fetch_files([Fetch(file, tmp_path / "back")])
    assert (tmp_path / "back").read_bytes() == upload.path.read_bytes()


def test_a_bounded_number_is_in_flight(tmp_path: Path) -> None:
    """Invariant 13: all callers together run no more PUTs at a time than the parallelism."""

    class Counting(FaultyBlobStore):
        running = most = 0
        lock = threading.Lock()

        def put(self, blob_id: str, body: object, *, ttl_days: int | None) -> None:
            with self.lock:
                self.running += 1
                self.most = max(self.most, self.running)
            threading.Event().wait(0.005)
            super().put(blob_id, body, ttl_days=ttl_days)  # type: ignore[arg-type]
            with self.lock:
                self.running -= 1

    blobs = Counting()
    engine = Transfer(blobs, SystemClock(), Threads(), parallelism=3, part_size=PART, ttl_days=1)
    uploads = [source(tmp_path, f"f{n}", noise(10 * PART, n)) for n in range(4)]
    threads = [threading.Thread(target=engine.upload_files, args=([upload],)) for upload in uploads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()
    assert blobs.count("put") == 40
    assert 1 < blobs.most <= 3


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Invariant 13: the upload of a large file does not hold the file in memory."""

    class Discarding(FaultyBlobStore):
        def put(self, blob_id: str, body: object, *, ttl_days: int | None) -> None:
            self.calls.append(("put", blob_id))

    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(300 * 1024 * 1024)
    whole = hasher()
    for _ in range(300):
        whole.update(b"\0" * 1024 * 1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    engine = Transfer(Discarding(), SystemClock(), Threads(), parallelism=4, part_size=64 * 1024 * 1024, ttl_days=1)
    engine.upload_files([Upload(path, 300 * 1024 * 1024, whole.digest(), "j/1/x")])
    engine.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_what_the_disk_cannot_read_is_fetched(
    transfer: Transfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a part of an earlier try counts as missing. Without descriptors nobody knows."""
    target = source(tmp_path, "left", b"data").path
    error = errno.EIO

    def fails(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", fails)
    assert not transfer.is_there(target, 0, 4, content_hash(b"data"))
    error = errno.ENFILE
    with pytest.raises(RetryableError):
        transfer.is_there(target, 0, 4, content_hash(b"data"))


def test_existing_targets_are_not_written_to(transfer: Transfer, tmp_path: Path) -> None:
    """FAULTS 28: an existing file or planted link at the target is refused and stays unchanged."""
    [file] = transfer.upload_files([source(tmp_path, "f", noise(PART))])
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    for target in ("victim", "link", "dangling"):
        with pytest.raises(InvalidError):
            transfer.fetch_files([Fetch(file, tmp_path / target)])
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_or_a_pipe_as_source_is_refused(transfer: Transfer, tmp_path: Path) -> None:
    """Only regular files are uploaded."""
    upload = source(tmp_path, "f", noise(PART))
    (tmp_path / "link").symlink_to(upload.path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(InvalidError):
            transfer.upload_files([Upload(tmp_path / name, upload.size, upload.hash, "j/1/x")])


def test_a_full_disk_is_said_to_be(transfer: Transfer, tmp_path: Path) -> None:
    """FAULTS 24: no room for a fetched file raises DiskFull. A file size limit stands in for a full disk."""
    [file] = transfer.upload_files([source(tmp_path, "f", noise(50 * PART))])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * PART, limits[1]))
    try:
        with pytest.raises(DiskFull):
            transfer.fetch_files([Fetch(file, tmp_path / "back")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_single_blobs(transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path) -> None:
    """Bytes and files are stored as single blobs and verified when read. A blob that is too large is not read."""
    ref = transfer.put("j/1/index", b"index")
    assert ref == BlobRef("j/1/index", 5, content_hash(b"index"))
    assert transfer.get_bytes(ref, 5) == b"index"
    with pytest.raises(CorruptBlob, match="refused"):
        transfer.get_bytes(ref, 4)
    upload = source(tmp_path, "f", noise(5 * PART))
    whole = transfer.put("j/1/f", FileSlice(upload.path, 0, upload.size))
    assert whole == BlobRef("j/1/f", upload.size, upload.hash)
    transfer.fetch_blob(whole, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == upload.path.read_bytes()
    blobs.altered["j/1/index"] = lambda data: data + b"!"
    with pytest.raises(CorruptBlob, match="j/1/index"):
        transfer.get_bytes(ref, 100)
    blobs.altered["j/1/index"] = lambda data: b"INDEX"
    with pytest.raises(CorruptBlob, match="j/1/index"):
        transfer.get_bytes(ref, 100)


def test_a_blob_that_is_there_is_not_missing(transfer: Transfer, blobs: FaultyBlobStore) -> None:
    """FAULTS 34: a REMOVE_TTL may say that a blob is missing although it is there. It is reported as a failure that is
    tried again: otherwise nobody would remove the TTL, and a published blob would expire."""
    transfer.put("j/1", b"x")
    blobs.faults["remove_ttl"] = [MissingBlob("no answer of the store", blob="j/1")]
    failed = transfer.remove_ttl_all(["j/1", "j/none"])
    assert isinstance(failed["j/1"], UnavailableError)
    assert isinstance(failed["j/none"], MissingBlob)
    assert transfer.remove_ttl_all(["j/1"]) == {}
    assert blobs.stat("j/1").expires_ms is None


def test_failures_of_many_blobs_are_told_one_by_one(transfer: Transfer, blobs: FaultyBlobStore) -> None:
    """A30, FAULTS 34: failed calls are returned with their reason, and all other calls are done."""
    for n in range(20):
        transfer.put(f"j/{n}", b"x")
    blobs.faults["remove_ttl"] = [AccessDenied("403")]
    failed = transfer.remove_ttl_all([*(f"j/{n}" for n in range(20)), "j/none", "j/0"])
    assert sorted(type(error).__name__ for error in failed.values()) == ["AccessDenied", "MissingBlob"]
    assert isinstance(failed["j/none"], MissingBlob)
    assert sum(info.expires_ms is not None for info in list_blobs(blobs, "j/")) == 1
    assert transfer.delete_all(f"j/{n}" for n in range(25)) == {}
    assert list(list_blobs(blobs, "")) == []


def test_an_interrupt_of_the_caller_waits_for_what_runs(
    transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path
) -> None:
    """An exception on the caller's own thread ends the batch before the call returns."""

    def progress(what: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    blobs.faults["put"] = [lambda _: threading.Event().wait(0.01)] * 500  # long enough for the first report
    with pytest.raises(KeyboardInterrupt):
        transfer.upload_files([source(tmp_path, "f", noise(500 * PART))], progress)
    assert 0 < blobs.count("put") < 500


def test_what_was_uploaded_is_what_the_store_has(transfer: Transfer, blobs: FaultyBlobStore, tmp_path: Path) -> None:
    """The blobs are the plain bytes of the file, so it can be put together by hand."""
    data = noise(3 * PART + 5)
    [file] = transfer.upload_files([source(tmp_path, "f", data)])
    assert b"".join(read(blobs, part.blob_id) for part in file.parts) == data


@pytest.fixture
def hedging(blobs: FaultyBlobStore) -> Iterator[Transfer]:
    """An engine that hedges at once, because it has learned that requests take no time."""
    engine = Transfer(blobs, SystemClock(), Threads(), parallelism=4, part_size=PART, ttl_days=30, hedged=True)
    for hedger in (engine.hedged_gets, engine.hedged_puts):
        assert hedger is not None
        for _ in range(50):
            hedger.call(lambda number: number)
    yield engine
    engine.close()


def test_a_get_that_does_not_answer_is_overtaken(hedging: Transfer, blobs: FaultyBlobStore, tmp_path: Path) -> None:
    """A GET that is slower than most is sent a second time, and the answer that comes first is used."""
    data = noise(3 * PART)
    [file] = hedging.upload_files([source(tmp_path, "f", data)])
    release = threading.Event()
    blobs.faults["get"] = [lambda _: release.wait(20)]
    hedging.fetch_files([Fetch(file, tmp_path / "back")])
    assert (tmp_path / "back").read_bytes() == data
    assert hedging.hedged_gets is not None
    assert hedging.hedged_gets.extra >= 1
    release.set()


def test_a_slow_put_is_overtaken_under_another_name(hedging: Transfer, blobs: FaultyBlobStore) -> None:
    """Each attempt has its own name, so nothing is overwritten. The blob of a late attempt is deleted."""
    release = threading.Event()
    blobs.faults["put"] = [lambda _: release.wait(20)]
    name = hedging.put_hedged("j/index", b"index")
    assert name == "j/index-1"
    release.set()
    hedging.close()
    assert [info.blob_id for info in list_blobs(blobs, "")] == [name]
