"""The verifying decorator: it reads uploads back if the store does not check them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from statemgr.blobs import BlobExists
from statemgr.blobs.body import BytesReader
from statemgr.blobs.verifying import VerifyingBlobStore
from statemgr.errors import CorruptBlob, MissingBlob
from statemgr.ports import BlobInfo, BlobReader, FileSlice
from tests.blob_faults import FaultyBlobStore, read


class Unchecking(FaultyBlobStore):
    """A store that accepts all bytes and corrupts the first ``spoilt`` PUTs."""

    checks_uploads = False

    def __init__(self, spoilt: int = 0) -> None:
        super().__init__()
        self.spoilt = spoilt

    def put(self, blob_id: str, body: object, *, ttl_days: int | None) -> None:
        """Write the body, or other bytes of the same length."""
        if self.spoilt:
            self.spoilt -= 1
            body = b"\0" * 4
        super().put(blob_id, body, ttl_days=ttl_days)  # type: ignore[arg-type]


def test_a_store_that_checks_is_not_read_back() -> None:
    """Invariant 2: if the store checks a checksum, nothing is read back."""
    inner = FaultyBlobStore()
    VerifyingBlobStore(inner).put("a", b"data", ttl_days=30)
    assert inner.count("get") == 0


def test_a_store_that_does_not_check_is_read_back() -> None:
    """Invariant 2: otherwise the bytes are read back before the PUT counts as done."""
    inner = Unchecking()
    VerifyingBlobStore(inner).put("a", b"data", ttl_days=30)
    assert inner.count("get") == 1


def test_wrong_bytes_are_written_again(tmp_path: Path) -> None:
    """FAULTS 12: a second PUT replaces a corrupted one, here for a file's slice, and the blob has its TTL."""
    (tmp_path / "file").write_bytes(b"--data--")
    inner = Unchecking(spoilt=1)
    VerifyingBlobStore(inner).put("a", FileSlice(tmp_path / "file", 2, 4), ttl_days=30)
    assert read(inner, "a") == b"data"
    assert inner.stat("a").expires_ms is not None


def test_wrong_bytes_twice_are_an_error() -> None:
    """FAULTS 12: if the store corrupts the bytes twice, CorruptBlob names the blob, and it is deleted."""
    inner = Unchecking(spoilt=2)
    with pytest.raises(CorruptBlob, match="blob=a"):
        VerifyingBlobStore(inner).put("a", b"data", ttl_days=30)
    with pytest.raises(MissingBlob):
        inner.stat("a")


@pytest.mark.parametrize("kept", [b"dat", b"dataX", b"DATA", b""])
def test_an_existing_blob_of_other_bytes_is_refused(kept: bytes) -> None:
    """Invariant 6: if a blob of that name has other bytes, the PUT is refused and the blob stays."""
    inner = FaultyBlobStore()
    inner.put("a", kept, ttl_days=None)
    with pytest.raises(BlobExists):
        VerifyingBlobStore(inner).put("a", b"data", ttl_days=30)
    assert read(inner, "a") == kept


class WrongAtFirst(FaultyBlobStore):
    """A store whose first answer to a GET has a wrong bit."""

    gets = 0

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        """Count it."""
        self.gets += 1
        if self.gets == 1:
            yield BytesReader(memoryview(b"dat`"))
            return
        with super().get(blob_id, offset, length) as reader:
            yield reader


def test_a_bit_that_is_wrong_in_the_first_answer_only() -> None:
    """A repeated PUT finds that the blob exists, and its first look at it gets a wrong bit: the PUT has succeeded."""
    inner = WrongAtFirst()
    inner.put("a", b"data", ttl_days=None)
    VerifyingBlobStore(inner).put("a", b"data", ttl_days=30)
    assert inner.gets == 2


class CopyingShort(FaultyBlobStore):
    """A store whose own copies lack their last byte."""

    def copy_from(self, source: object, wanted: BlobInfo, blob_id: str, *, ttl_days: int) -> bool:
        """Say that the blob was copied."""
        self.put(blob_id, read(self, wanted.blob_id)[:-1], ttl_days=ttl_days)
        return True


def test_a_copy_that_arrives_short_does_not_count() -> None:
    """The store says that it has copied the blob, and the copy is shorter: it is deleted, and the caller copies it."""
    inner = CopyingShort()
    inner.put("a", b"data", ttl_days=None)
    store = VerifyingBlobStore(inner)
    assert not store.copy_from(inner, inner.stat("a"), "b", ttl_days=30)
    with pytest.raises(MissingBlob):
        inner.stat("b")
    store.put("b", b"data", ttl_days=30)


class CopiedBefore(CopyingShort):
    """A store that has made a copy, and whose answer was lost."""

    def copy_from(self, source: object, wanted: BlobInfo, blob_id: str, *, ttl_days: int) -> bool:
        """Refuse to copy again."""
        raise BlobExists("a blob of this name exists already", blob=blob_id)


def test_a_copy_that_is_there_does_not_count() -> None:
    """The caller then sends the bytes, which are compared with what is there."""
    inner = CopiedBefore()
    inner.put("a", b"12345", ttl_days=None)
    assert not VerifyingBlobStore(inner).copy_from(inner, inner.stat("a"), "b", ttl_days=30)


def test_it_always_says_that_uploads_are_checked() -> None:
    """A decorator around this one need not read back again."""
    assert VerifyingBlobStore(Unchecking()).checks_uploads
