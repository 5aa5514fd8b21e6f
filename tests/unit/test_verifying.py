"""The verifying decorator: uploads to a store that does not check them are read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from statemgr.blobs import BlobExists
from statemgr.blobs.verifying import VerifyingBlobStore
from statemgr.errors import CorruptBlob, MissingBlob
from statemgr.ports import FileSlice
from tests.blob_faults import FaultyBlobStore, read


class Unchecking(FaultyBlobStore):
    """A store that takes whatever arrives, and spoils the first ``spoilt`` PUTs."""

    checks_uploads = False

    def __init__(self, spoilt: int = 0) -> None:
        super().__init__()
        self.spoilt = spoilt

    def put(self, blob_id: str, body: object, *, ttl_days: int | None) -> None:
        """Write, perhaps other bytes of the same length."""
        if self.spoilt:
            self.spoilt -= 1
            body = b"\0" * 4
        super().put(blob_id, body, ttl_days=ttl_days)  # type: ignore[arg-type]


def test_a_store_that_checks_is_not_read_back() -> None:
    """Invariant 2: a checksum that the store checked is enough."""
    inner = FaultyBlobStore()
    VerifyingBlobStore(inner).put("a", b"data", ttl_days=30)
    assert inner.count("get") == 0


def test_a_store_that_does_not_check_is_read_back() -> None:
    """Invariant 2: otherwise the bytes are read back before the PUT counts as done."""
    inner = Unchecking()
    VerifyingBlobStore(inner).put("a", b"data", ttl_days=30)
    assert inner.count("get") == 1


def test_wrong_bytes_are_written_again(tmp_path: Path) -> None:
    """FAULTS 12: one wrong PUT is replaced by a second one, also of a file's slice, with its TTL."""
    (tmp_path / "file").write_bytes(b"--data--")
    inner = Unchecking(spoilt=1)
    VerifyingBlobStore(inner).put("a", FileSlice(tmp_path / "file", 2, 4), ttl_days=30)
    assert read(inner, "a") == b"data"
    assert inner.stat("a").expires_ms is not None


def test_wrong_bytes_twice_are_an_error() -> None:
    """FAULTS 12: a store that spoils the bytes twice gives CorruptBlob with the name, and nothing wrong stays."""
    inner = Unchecking(spoilt=2)
    with pytest.raises(CorruptBlob, match="blob=a"):
        VerifyingBlobStore(inner).put("a", b"data", ttl_days=30)
    with pytest.raises(MissingBlob):
        inner.stat("a")


@pytest.mark.parametrize("kept", [b"dat", b"dataX", b"DATA", b""])
def test_an_existing_blob_of_other_bytes_is_refused(kept: bytes) -> None:
    """Invariant 6: a name that is taken by other bytes is refused, and they stay."""
    inner = FaultyBlobStore()
    inner.put("a", kept, ttl_days=None)
    with pytest.raises(BlobExists):
        VerifyingBlobStore(inner).put("a", b"data", ttl_days=30)
    assert read(inner, "a") == kept


def test_it_always_says_that_uploads_are_checked() -> None:
    """Whoever stands above need not read back again."""
    assert VerifyingBlobStore(Unchecking()).checks_uploads
