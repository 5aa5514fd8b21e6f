"""What every blob store does: the tests of :class:`statemgr.ports.BlobStore` and its administration.

A store of your own passes them as a subclass in a test module, which pytest collects::

    class TestMyStore(BlobStoreSuite):
        @pytest.fixture
        def blobs(self) -> Iterator[BlobStore]:
            store = MyStore(...)  # empty
            yield store
            store.close()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from statemgr.blobs import BlobExists
from statemgr.blobs.retrying import RetryingBlobStore
from statemgr.blobs.verifying import VerifyingBlobStore
from statemgr.config import RetryPolicy
from statemgr.config.units import DAY_MS
from statemgr.errors import InvalidError, MissingBlob, StatemgrError, UnavailableError
from statemgr.local.machine import SystemClock
from statemgr.model.hashing import content_hash
from statemgr.ports import BlobStore, CopyingBlobStore, FileSlice, list_blobs

_RETRIES = RetryPolicy(
    max_retries=10, max_duration_ms=30_000, backoff_ms=10, backoff_max_ms=500, factor=2.0, jitter=0.5
)


def read(store: BlobStore, blob_id: str, offset: int = 0, length: int | None = None, step: int = 7) -> bytes:
    """A blob's bytes, read in pieces of ``step``, and once more with ``copy_to`` into a file."""
    found = bytearray()
    buffer = memoryview(bytearray(step))
    with store.get(blob_id, offset, length) as reader:
        while size := reader.readinto(buffer):
            found += buffer[:size]
        assert reader.readinto(buffer) == 0
    with TemporaryFile() as file, store.get(blob_id, offset, length) as reader:
        at = 0
        while copied := reader.copy_to(file.fileno(), at, step):
            at += copied
        file.seek(0)
        assert copied is None or file.read() == found
    return bytes(found)


class BlobStoreSuite:
    """Each test gets an empty store from the fixture ``blobs``."""

    @pytest.fixture
    def blobs(self) -> Iterator[BlobStore]:
        """An empty store, closed at the end. Override it."""
        raise NotImplementedError

    @pytest.mark.parametrize("size", [0, 1, 7, 70_000, 3_000_000])
    def test_what_was_put_is_got(self, blobs: BlobStore, size: int) -> None:
        """Bytes come back as they were written, whatever their number."""
        data = bytes(range(251)) * (size // 251 + 1)
        blobs.put("job/1/Partition_0/s/a/file.0", data[:size], ttl_days=None)
        assert read(blobs, "job/1/Partition_0/s/a/file.0", step=65536) == data[:size]

    @pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, 5), (4_000, 100_000), (199_999, 1), (200_000, 0)])
    def test_a_slice_of_a_file_as_body(self, blobs: BlobStore, tmp_path: Path, offset: int, length: int) -> None:
        """A27: exactly the slice's bytes are written, of a file that has more."""
        content = bytes(i % 253 for i in range(200_000))
        (tmp_path / "source").write_bytes(content)
        blobs.put("a/part.1", FileSlice(tmp_path / "source", offset, length), ttl_days=30)
        assert read(blobs, "a/part.1", step=4096) == content[offset : offset + length]

    @pytest.mark.parametrize(
        ("offset", "length", "expected"),
        [(0, None, b"0123456789"), (3, None, b"3456789"), (3, 4, b"3456"), (0, 1, b"0"), (8, 50, b"89")]
        + [(10, None, b""), (10, 5, b""), (12, None, b""), (4, 0, b"")],
    )
    def test_ranges(self, blobs: BlobStore, offset: int, length: int | None, expected: bytes) -> None:
        """A GET of a range gives what the blob has of it, and nothing beyond its end."""
        blobs.put("a/b", b"0123456789", ttl_days=None)
        assert read(blobs, "a/b", offset, length, step=3) == expected

    @pytest.mark.parametrize("length", [None, 0, 5])
    def test_a_missing_blob_is_said_to_be(self, blobs: BlobStore, length: int | None) -> None:
        """FAULTS 13: GET, STAT and REMOVE_TTL of a blob that does not exist raise MissingBlob with its name."""
        blobs.put("a/other", b"x", ttl_days=None)
        for blob_id in ("a/none", "none/at/all", "a/other2"):
            with pytest.raises(MissingBlob, match=blob_id):
                read(blobs, blob_id, 0, length)
            with pytest.raises(MissingBlob, match=blob_id):
                blobs.stat(blob_id)
            with pytest.raises(MissingBlob, match=blob_id):
                blobs.remove_ttl(blob_id)

    def test_delete_is_idempotent(self, blobs: BlobStore) -> None:
        """A14: deleting a blob twice, or one that never existed, is no error; its neighbours stay."""
        blobs.put("a/b/x", b"x", ttl_days=30)
        blobs.put("a/b/xy", b"xy", ttl_days=30)
        for _ in range(2):
            blobs.delete("a/b/x")
            blobs.delete("a/b/never")
            blobs.delete("never/was/here")
        with pytest.raises(MissingBlob):
            blobs.stat("a/b/x")
        assert read(blobs, "a/b/xy") == b"xy"
        blobs.delete("a/b/xy")
        blobs.put("a/b/x", b"again", ttl_days=None)
        assert read(blobs, "a/b/x") == b"again"

    def test_many_are_deleted_at_once(self, blobs: BlobStore) -> None:
        """A14: the same as one by one: blobs that never existed are no error, and no other blob is deleted."""
        names = [f"many/{n:03}" for n in range(150)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: blobs.put(name, b"x", ttl_days=30), [*names, "many/kept", "few/kept"]))
        for _ in range(2):
            assert blobs.delete_many([*names, "many/never", "never/was"]) == {}
        assert {info.blob_id for info in list_blobs(blobs, "")} == {"many/kept", "few/kept"}

    def test_ttl_is_set_and_removed(self, blobs: BlobStore) -> None:
        """A9: a blob has its TTL from its PUT on, until REMOVE_TTL removes it; removing it again changes nothing."""
        before = time.time_ns() // 1_000_000
        blobs.put("a/kept", b"kept", ttl_days=None)
        blobs.put("a/expires", b"expires", ttl_days=30)
        expires = blobs.stat("a/expires").expires_ms
        assert expires is not None
        assert expires == -1 or abs(expires - before - 30 * DAY_MS) < 60_000
        assert blobs.stat("a/kept").expires_ms is None
        for _ in range(2):
            blobs.remove_ttl("a/expires")
            blobs.remove_ttl("a/kept")
            assert blobs.stat("a/expires").expires_ms is None
        assert read(blobs, "a/expires") == b"expires"

    def test_stat_tells_size_and_time(self, blobs: BlobStore) -> None:
        """STAT gives name, size and the time of the writing."""
        blobs.put("a/b", b"12345", ttl_days=None)
        info = blobs.stat("a/b")
        assert (info.blob_id, info.size) == ("a/b", 5)
        assert abs(info.modified_ms - time.time_ns() // 1_000_000) < 60_000

    def test_nothing_is_overwritten(self, blobs: BlobStore) -> None:
        """Invariant 6: a second PUT of a name with other bytes is refused and changes nothing."""
        blobs.put("a/b", b"first", ttl_days=None)
        with pytest.raises(BlobExists):
            blobs.put("a/b", b"second", ttl_days=30)
        assert read(blobs, "a/b") == b"first"
        assert blobs.stat("a/b").expires_ms is None

    def test_a_repeated_put_sets_no_ttl(self, blobs: BlobStore) -> None:
        """A request that arrives late, after the TTL was removed, does not let the blob expire."""
        blobs.put("a/b", b"first", ttl_days=30)
        blobs.remove_ttl("a/b")
        with suppress(BlobExists):
            blobs.put("a/b", b"first", ttl_days=30)
        assert blobs.stat("a/b").expires_ms is None

    @pytest.mark.parametrize(
        "name",
        ["", "/", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/..", ".", "a/./b", ".hidden", "a/.x", "a\0b", "a\nb"]
        + ["a\\b", "x" * 201, "/".join(["abcdefghi"] * 100)],
    )
    def test_hostile_names_are_refused(self, blobs: BlobStore, name: str) -> None:
        """Invariant 15, FAULTS 27: a name that could lead elsewhere is refused by every method, before any I/O."""
        calls: list[Callable[[], object]] = [
            lambda: blobs.put(name, b"x", ttl_days=None), lambda: read(blobs, name), lambda: blobs.delete(name),
            lambda: blobs.remove_ttl(name), lambda: blobs.stat(name),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(InvalidError):
                call()
        with suppress(InvalidError):
            assert isinstance(blobs.delete_many([name])[name], InvalidError)
        assert list(list_blobs(blobs, "")) == []

    def test_list_by_prefix(self, blobs: BlobStore) -> None:
        """A listing has every blob of the prefix once, with its size, and none of the records next to them."""
        names = ["j/1/a/x.0", "j/1/a/x.1", "j/1/ab/y", "j/1/b", "j/10/a", "other"]
        for number, name in enumerate(names):
            blobs.put(name, b"x" * number, ttl_days=30)

        def listed(prefix: str) -> list[str]:
            return sorted(info.blob_id for info in list_blobs(blobs, prefix))

        assert listed("") == sorted(names)
        assert listed("j/1/") == names[:4]
        assert listed("j/1") == sorted(names[:5])
        assert listed("j/1/a") == names[:3]
        assert listed("j/1/a/") == names[:2]
        assert listed("j/1/a/x.1") == ["j/1/a/x.1"]
        assert listed("none/") == listed("j/1/none") == []
        assert {info.blob_id: info.size for info in list_blobs(blobs, "j/")} == {n: i for i, n in enumerate(names[:5])}

    def test_names_that_look_like_patterns(self, blobs: BlobStore) -> None:
        """Wildcards of other software are characters like any other, and upper and lower case differ."""
        names = ["P_x/a", "p%x/a", "p*x/a", "p_x/A", "p_x/a", "pax/a"]
        for name in names:
            blobs.put(name, name.encode(), ttl_days=30)
        for name in names:
            assert [info.blob_id for info in list_blobs(blobs, name)] == [name]
            assert read(blobs, name) == name.encode()
        assert sorted(info.blob_id for info in list_blobs(blobs, "p_x/")) == ["p_x/A", "p_x/a"]
        blobs.delete("p_x/a")
        assert sorted(info.blob_id for info in list_blobs(blobs, "")) == [name for name in names if name != "p_x/a"]

    def test_a_copy_inside_the_store(self, blobs: BlobStore) -> None:
        """A store that copies a blob by itself writes the same bytes, with a TTL."""
        blobs.put("a/b", b"some bytes", ttl_days=None)
        wanted = blobs.stat("a/b")
        if not isinstance(blobs, CopyingBlobStore) or not blobs.copy_from(blobs, wanted, "c/d", ttl_days=3):
            assert [info.blob_id for info in list_blobs(blobs, "c/")] == []
            return
        assert read(blobs, "c/d") == b"some bytes"
        assert blobs.stat("c/d").expires_ms is not None
        assert blobs.stat("a/b").expires_ms is None
        blobs.delete("a/b")
        assert read(blobs, "c/d") == b"some bytes"
        with pytest.raises(MissingBlob):
            blobs.copy_from(blobs, wanted, "c/e", ttl_days=3)

    def test_all_of_the_port_is_there(self, blobs: BlobStore) -> None:
        """What only some stores and commands call exists in every store."""
        assert isinstance(blobs.checks_uploads, bool)
        assert isinstance(blobs.administration.listing_tells_ttl, bool)
        assert all(callable(method) for method in (blobs.administration.abandon, blobs.administration.fix))

    def test_the_stores_own_time(self, blobs: BlobStore) -> None:
        """The store's clock, if it tells it, is the one that blobs' times come from, to the second."""
        try:
            before = blobs.administration.time_ms()
        except InvalidError:
            return
        blobs.put("j/a", b"x", ttl_days=None)
        assert before - 2000 <= blobs.stat("j/a").modified_ms <= blobs.administration.time_ms() + 2000
        assert [info.blob_id for info in list_blobs(blobs, "")] == ["j/a"]

    def test_whether_a_listing_tells_ttls(self, blobs: BlobStore) -> None:
        """A listing that claims to tell TTLs does so, for blobs with and without one."""
        blobs.put("j/with", b"x", ttl_days=3)
        blobs.put("j/without", b"x", ttl_days=None)
        told = {info.blob_id: info.expires_ms is not None for info in list_blobs(blobs, "j/")}
        known = {name: blobs.stat(name).expires_ms is not None for name in told}
        assert known == {"j/with": True, "j/without": False}
        assert not blobs.administration.listing_tells_ttl or told == known
        with suppress(InvalidError):
            assert list(blobs.administration.unfinished("j/")) == []

    def test_listing_more_than_a_page(self, blobs: BlobStore) -> None:
        """A listing of more blobs than a server answers at once is whole."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: blobs.put(f"many/{i:04}", b"", ttl_days=None), range(1050)))
        assert sorted(info.blob_id for info in list_blobs(blobs, "many/")) == [f"many/{i:04}" for i in range(1050)]

    @pytest.mark.parametrize("name", ["a b+c%2F=&?#:@/ü€😀.sst", "Ⓐ" * 60 + "/x", "a.expires", "a.tmp", "-x", "~"])
    def test_unusual_names(self, blobs: BlobStore, name: str) -> None:
        """Names with characters that need escaping come back from a listing as they are."""
        blobs.put(name, b"x", ttl_days=30)
        assert read(blobs, name) == b"x"
        assert blobs.stat(name).size == 1
        assert [info.blob_id for info in list_blobs(blobs, name)] == [name]
        blobs.remove_ttl(name)
        blobs.delete(name)
        assert list(list_blobs(blobs, "")) == []

    def test_many_threads_at_once(self, blobs: BlobStore) -> None:
        """Threads that write, read and delete in one directory do not disturb each other.

        A store may answer UnavailableError to a call that met another one. Callers try it again, and so does this test.
        """
        retried = RetryingBlobStore(blobs, _RETRIES, SystemClock())

        def work(number: int) -> bool:
            name = f"shared/{number % 3}/blob-{number}"
            for _ in range(5):
                retried.put(name, name.encode() * 100, ttl_days=30)
                if read(retried, name, step=4096) != name.encode() * 100:
                    return False
                retried.remove_ttl(name)
                retried.delete(name)
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(24)))
        assert list(list_blobs(blobs, "")) == []

    def test_one_of_many_writers_of_a_name_wins(self, blobs: BlobStore) -> None:
        """Invariant 6: of many PUTs of one name with different bytes exactly one is done, whole."""
        barrier = threading.Barrier(6)

        def work(number: int) -> bytes | None:
            data = bytes([number]) * 50_000
            barrier.wait()
            try:
                blobs.put("contended", data, ttl_days=None)
            except (BlobExists, UnavailableError):
                return None  # taken, or another is being written
            return data

        with ThreadPoolExecutor(6) as pool:
            done = [data for data in pool.map(work, range(6)) if data is not None]
        assert len(done) == 1
        assert read(blobs, "contended", step=65536) == done[0]

    def test_a_failed_put_leaves_nothing(self, blobs: BlobStore, tmp_path: Path) -> None:
        """FAULTS 2: a PUT whose source ends early raises a typed error, and there is no blob of the name."""
        (tmp_path / "source").write_bytes(b"short")
        with pytest.raises(StatemgrError):
            blobs.put("a/b", FileSlice(tmp_path / "source", 0, 100), ttl_days=30)
        with pytest.raises(MissingBlob):
            blobs.stat("a/b")
        assert list(list_blobs(blobs, "")) == []

    def test_a_file_that_has_changed_is_refused(self, blobs: BlobStore, tmp_path: Path) -> None:
        """Invariant 2: bytes with another hash than that of the body are no blob that a checkpoint may name. If the
        store does not check uploads, statemgr reads them back."""
        (tmp_path / "source").write_bytes(b"changed")
        body = FileSlice(tmp_path / "source", 0, 7, content_hash(b"unknown"))
        with pytest.raises(StatemgrError):
            VerifyingBlobStore(blobs).put("a/b", body, ttl_days=30)
        blobs.put("a/c", FileSlice(tmp_path / "source", 0, 7, content_hash(b"changed")), ttl_days=30)
        assert read(blobs, "a/c") == b"changed"

    def test_a_reader_that_stops_early(self, blobs: BlobStore) -> None:
        """A GET may be closed before its end, many times, without using up connections or files."""
        blobs.put("a/b", b"x" * 300_000, ttl_days=None)
        buffer = memoryview(bytearray(10))
        for _ in range(40):
            with blobs.get("a/b") as reader:
                assert reader.readinto(buffer) > 0
        assert len(read(blobs, "a/b", step=65536)) == 300_000

    def test_errors_of_the_reading_code_pass_through(self, blobs: BlobStore) -> None:
        """An error that the code inside a GET raises is not taken for one of the store."""
        blobs.put("a/b", b"x", ttl_days=None)
        with pytest.raises(OSError, match="mine"), blobs.get("a/b"):
            raise OSError(28, "mine")

    def test_probe_finds_nothing_or_says_what(self, blobs: BlobStore) -> None:
        """A probe answers with texts for people and leaves nothing behind."""
        assert all(isinstance(problem, str) and problem for problem in blobs.administration.probe())
        assert list(list_blobs(blobs, "")) == []
