"""What a decorator of a blob store does not change. Touches nothing but the store inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from statemgr.errors import StatemgrError
from statemgr.ports import BlobAdministration, BlobInfo, BlobReader, BlobStore, Body


class BlobStoreDecorator:
    """Passes every call on to ``inner``; a subclass overrides what it changes."""

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner

    @property
    def checks_uploads(self) -> bool:
        return self.inner.checks_uploads

    @property
    def administration(self) -> BlobAdministration:
        return self.inner.administration

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        self.inner.put(blob_id, body, ttl_days=ttl_days)

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
