"""Reads back every upload to a store that does not check uploads itself. Touches nothing beside that store.

Also makes a repeated PUT harmless: a PUT that was answered with an error may have landed, and its repetition
then finds the name taken. If the content is the same it is done, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import xxhash

from statemgr.blobs.body import CHUNK, body_size, chunks, open_body
from statemgr.blobs.names import BlobExists
from statemgr.errors import CorruptBlob, InvalidError, MissingBlob, StatemgrError
from statemgr.ports import BlobInfo, BlobReader, BlobStore, Body, UnfinishedUpload


class VerifyingBlobStore:
    """A blob store whose finished PUTs are known to hold what was sent."""

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner

    @property
    def checks_uploads(self) -> bool:
        """Always: by the store inside, or by reading back."""
        return True

    @property
    def listing_tells_ttl(self) -> bool:
        """As the port says."""
        return self.inner.listing_tells_ttl

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        """As the port says. Raises: CorruptBlob when the store twice kept other bytes than were sent."""
        try:
            self.inner.put(blob_id, body, ttl_days=ttl_days)
        except BlobExists as exists:
            try:
                if not self._holds(blob_id, body):
                    raise
            except MissingBlob:
                raise InvalidError(
                    "the blob store refuses a new blob because it exists, and says that it does not exist",
                    blob=blob_id,
                    hint="the server, or a proxy in front of it, answers If-None-Match wrongly (412)",
                ) from exists
            return
        if self.inner.checks_uploads or self._holds(blob_id, body):
            return
        self.inner.delete(blob_id)
        self.inner.put(blob_id, body, ttl_days=ttl_days)
        if not self._holds(blob_id, body):
            self.inner.delete(blob_id)
            raise CorruptBlob(
                "the blob store keeps other bytes than were sent, twice in a row",
                blob=blob_id,
                hint="check the memory and disks of the blob store, and what stands between",
            )

    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> AbstractContextManager[BlobReader]:
        """As the port says."""
        return self.inner.get(blob_id, offset, length)

    def delete(self, blob_id: str) -> None:
        """As the port says."""
        self.inner.delete(blob_id)

    @property
    def most_deletes(self) -> int:
        """As the port says."""
        return self.inner.most_deletes

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        """As the port says."""
        return self.inner.delete_many(blob_ids)

    def remove_ttl(self, blob_id: str) -> None:
        """As the port says."""
        self.inner.remove_ttl(blob_id)

    def stat(self, blob_id: str) -> BlobInfo:
        """As the port says."""
        return self.inner.stat(blob_id)

    def list(self, prefix: str, after: str | None = None) -> Iterator[BlobInfo]:
        """As the port says."""
        return self.inner.list(prefix, after)

    def time_ms(self) -> int:
        """As the port says."""
        return self.inner.time_ms()

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """As the port says."""
        return self.inner.unfinished(prefix)

    def abandon(self, upload: UnfinishedUpload) -> None:
        """As the port says."""
        self.inner.abandon(upload)

    def probe(self) -> Sequence[str]:
        """As the port says."""
        return self.inner.probe()

    def close(self) -> None:
        """Close the store inside."""
        self.inner.close()

    def _holds(self, blob_id: str, body: Body) -> bool:
        there, size = xxhash.xxh3_128(), 0
        with self.inner.get(blob_id) as reader:
            for piece in chunks(reader, memoryview(bytearray(min(CHUNK, body_size(body) + 1)))):
                there.update(piece)
                size += len(piece)
        sent = xxhash.xxh3_128()
        with open_body(body) as stream:
            while data := stream.read(CHUNK):
                sent.update(data)
        return size == body_size(body) and there.digest() == sent.digest()
