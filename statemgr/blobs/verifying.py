"""Reads back every upload to a store that does not check uploads itself. Touches only that store.

It also makes a repeated PUT harmless. A PUT may succeed although the server answers with an error. The retry then finds
that the name exists. If the blob has the same bytes, the PUT has succeeded; otherwise it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from statemgr.blobs.body import CHUNK, body_size, chunks, open_body
from statemgr.blobs.names import BlobExists
from statemgr.errors import CorruptBlob, InvalidError, MissingBlob, StatemgrError
from statemgr.model.hashing import hasher
from statemgr.ports import BlobAdministration, BlobInfo, BlobReader, BlobStore, Body, CopyingBlobStore


class VerifyingBlobStore:
    """A blob store in which the blob of every finished PUT has exactly the bytes that were sent."""

    #: The inner store checks uploads, or they are read back.
    checks_uploads = True

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        """Raises: CorruptBlob if the store twice kept other bytes than were sent."""
        try:
            self.inner.put(blob_id, body, ttl_days=ttl_days)
        except BlobExists as exists:
            try:
                if not self._holds(blob_id, body):
                    raise
            except MissingBlob:
                raise InvalidError(
                    "the blob store refuses a new blob because it exists, and then reports that it does not exist",
                    blob=blob_id,
                    hint="check the server and the proxies in front of it: one answers If-None-Match wrongly (412)",
                ) from exists
            return
        if self.inner.checks_uploads or self._holds(blob_id, body):
            return
        self.inner.delete(blob_id)
        self.inner.put(blob_id, body, ttl_days=ttl_days)
        if not self._holds(blob_id, body):
            self.inner.delete(blob_id)
            raise CorruptBlob(
                "the blob store twice kept other bytes than were sent",
                blob=blob_id,
                hint="check the memory and disks of the blob store, and the network to it",
            )

    def copy_from(self, source: BlobStore, wanted: BlobInfo, blob_id: str, *, ttl_days: int) -> bool:
        """The store that copies sees to it that the bytes are the same. A copy of another size is deleted, and does not
        count."""
        inner = self.inner
        try:
            if not isinstance(inner, CopyingBlobStore) or not inner.copy_from(
                source, wanted, blob_id, ttl_days=ttl_days
            ):
                return False
        except BlobExists:  # perhaps a copy whose answer was lost: a PUT of the blob compares it
            return False
        if inner.stat(blob_id).size == wanted.size:
            return True
        inner.delete(blob_id)
        return False

    def _holds(self, blob_id: str, body: Body) -> bool:
        """Whether the blob has these bytes. Others are read once more: they may be wrong only on their way here."""
        sent = hasher()
        with open_body(body) as stream:
            while data := stream.read(CHUNK):
                sent.update(data)
        wanted = body_size(body), sent.digest()
        return self._stored(blob_id, wanted[0]) == wanted or self._stored(blob_id, wanted[0]) == wanted

    def _stored(self, blob_id: str, expected: int) -> tuple[int, bytes]:
        """Size and hash of a blob that has ``expected`` bytes, if all is well."""
        there, size = hasher(), 0
        with self.inner.get(blob_id) as reader:
            for piece in chunks(reader, memoryview(bytearray(min(CHUNK, expected + 1)))):
                there.update(piece)
                size += len(piece)
        return size, there.digest()

    # --- passed on ---

    @property
    def administration(self) -> BlobAdministration:
        return self.inner.administration

    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> AbstractContextManager[BlobReader]:
        return self.inner.get(blob_id, offset, length)

    def stat(self, blob_id: str) -> BlobInfo:
        return self.inner.stat(blob_id)

    def remove_ttl(self, blob_id: str) -> None:
        self.inner.remove_ttl(blob_id)

    def delete(self, blob_id: str) -> None:
        self.inner.delete(blob_id)

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        return self.inner.delete_many(blob_ids)

    def close(self) -> None:
        self.inner.close()
