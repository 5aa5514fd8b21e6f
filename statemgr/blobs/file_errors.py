"""What the file system's errors mean for a directory of blobs, in statemgr's words. Touches nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager

from statemgr import os_errors
from statemgr.errors import CorruptBlob, MissingBlob, StatemgrError, UnavailableError
from statemgr.os_errors import Fault

_LINKS = "links below blob.store.uri are never followed"
_KINDS = {
    Fault.GONE: MissingBlob,
    Fault.EXISTS: CorruptBlob,
    Fault.ALTERED: CorruptBlob,
    # the retries of the store above are for these two
    Fault.LIMIT: UnavailableError,
    Fault.FAILED: UnavailableError,
}
_HINTS = {
    Fault.GONE: "it was deleted, or its TTL has passed",
    Fault.EXISTS: _LINKS,
    Fault.ALTERED: _LINKS,
    Fault.REFUSED: "check owner and mode of the directory of blob.store.uri",
    Fault.FAILED: "check the disk or the mount of blob.store.uri",
}


def not_a_file(blob_id: str) -> StatemgrError:
    """What stands at a blob's name is a directory, a link or a device."""
    return CorruptBlob("the blob is not a regular file", blob=blob_id, hint=_LINKS)


def translated(blob_id: str) -> AbstractContextManager[None]:
    """OSErrors of the block as statemgr's.

    Raises: MissingBlob, CorruptBlob (no regular file), DiskFull, AccessDenied, UnavailableError.
    """
    return os_errors.translated("the blob cannot be read or written", None, kinds=_KINDS, hints=_HINTS, blob=blob_id)
