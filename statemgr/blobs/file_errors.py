"""What the file system's errors mean for a directory of blobs, in statemgr's words. Touches nothing."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from statemgr.errors import AccessDenied, CorruptBlob, DiskFull, MissingBlob, StatemgrError, UnavailableError


def not_a_file(blob_id: str) -> StatemgrError:
    """What stands at a blob's name is a directory, a link or a device."""
    return CorruptBlob(
        "the blob is not a regular file", blob=blob_id, hint="links below blob.store.uri are never followed"
    )


@contextmanager
def translated(blob_id: str) -> Iterator[None]:
    """OSErrors of the block as statemgr's."""
    try:
        yield
    except OSError as error:
        raise _translate(error, blob_id) from error


def _translate(error: OSError, blob_id: str) -> StatemgrError:
    what = error.strerror or str(error)
    match error.errno:
        case errno.ENOENT | errno.EISDIR:
            return MissingBlob("the blob does not exist", blob=blob_id)
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return DiskFull(f"no space for the blob: {what}", blob=blob_id, hint="free space and call again")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return AccessDenied(
                f"the blob directory refuses: {what}",
                blob=blob_id,
                hint="check owner and mode of blob.store.uri",
            )
        case errno.ELOOP | errno.ENOTDIR | errno.EEXIST:
            return CorruptBlob(
                "a link or a file stands where a directory or a blob should",
                blob=blob_id,
                hint="links below blob.store.uri are never followed",
            )
        case _:
            return UnavailableError(f"the blob directory failed: {what}", blob=blob_id)
