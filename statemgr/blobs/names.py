"""The rule for names of blobs, and functions that several stores share.

A name consists of parts joined by ``/``. No part starts with a dot, so that a store can keep its own records next to
the blobs, and each is short enough for a file name everywhere.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from statemgr.errors import InvalidError, StatemgrError
from statemgr.ports import BlobInfo, BlobPage

#: Bytes of UTF-8; S3 allows 1024 with the prefix of the store's URI.
MAX_BLOB_ID = 900
#: Bytes of UTF-8 of one part: a file name has 255, and the records next to a blob need some of them.
MAX_PART = 200
#: Blobs of one page of a listing, as S3 has it.
_PAGE = 1000


class BlobExists(InvalidError):
    """A blob of this name exists already; nothing was written."""


def check_blob_id(blob_id: str) -> tuple[str, ...]:
    """The parts of a blob's name. Raises: InvalidError if it is not one."""
    problem = _problem(blob_id)
    if problem:
        raise InvalidError(f"{blob_id[:200]!r} cannot be the name of a blob: {problem}")
    return tuple(blob_id.split("/"))


def unique_name() -> str:
    """32 random hexadecimal digits, for what a store writes next to blobs for a short time."""
    return uuid.uuid4().hex


def delete_each(blob_ids: Iterable[str], delete: Callable[[str], None]) -> dict[str, StatemgrError]:
    """Delete blobs one by one. Returns: the blobs that could not be deleted, and why."""
    failed: dict[str, StatemgrError] = {}
    for blob_id in blob_ids:
        try:
            delete(blob_id)
        except StatemgrError as error:
            failed[blob_id] = error
    return failed


def page_of(blobs: Iterator[BlobInfo]) -> BlobPage:
    """The next page of a listing whose token is its last name."""
    page = list(islice(blobs, _PAGE))
    return BlobPage(page, page[-1].blob_id if len(page) == _PAGE else None)


def _problem(blob_id: str) -> str | None:
    if not blob_id.isprintable():
        return "it has control characters"
    if "\\" in blob_id:
        return "it has a backslash"
    if len(blob_id.encode("utf-8", "surrogatepass")) > MAX_BLOB_ID:
        return f"it is longer than {MAX_BLOB_ID} bytes"
    for part in blob_id.split("/"):
        if not part:
            return "a part of it is empty"
        if part.startswith("."):
            return "a part of it starts with a dot"
        if len(part.encode("utf-8", "surrogatepass")) > MAX_PART:
            return f"a part of it is longer than {MAX_PART} bytes"
    return None
