"""Packs: small files of a commit together in one blob, each at an offset, so that many cost few requests.

A pack is held in memory while it is sent, and so is a run of neighbours while it is fetched: both are bounded by
``PACK_SIZE``. Touches the files that it is given, and blobs through the transfer engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from statemgr.errors import CorruptFile
from statemgr.local.transfer_files import SourceFile
from statemgr.model.checkpoint import BlobRef
from statemgr.model.diff import LocalFile
from statemgr.model.hashing import content_hash
from statemgr.model.snapshot import FileIndex
from statemgr.transfer.transfer import Transfer

#: Largest file that goes into a pack.
PACK_LIMIT = 1024 * 1024
#: Largest pack.
PACK_SIZE = 4 * 1024 * 1024


def read_file(root: Path, file: LocalFile) -> tuple[bytes, bytes]:
    """The content of a small local file, and its hash. Raises: CorruptError when it is not what was committed."""
    with SourceFile(root / file.path) as source:
        data = bytearray(file.size)
        for _ in source.pieces(0, file.size, memoryview(data)):
            pass
    digest = content_hash(data)
    if source.size != file.size or file.hash not in (None, digest):
        raise CorruptFile("a local file is not what it was when it was committed", path=root / file.path)
    return bytes(data), digest


def upload_packs(
    transfer: Transfer, root: Path, files: Iterable[LocalFile], blob_name: Callable[[int], str]
) -> dict[str, FileIndex]:
    """Upload files of at most ``PACK_LIMIT`` in packs. Returns: path → file. Raises: as ``Transfer.upload_files``."""
    found: dict[str, FileIndex] = {}
    with transfer.batch() as batch:
        for number, group in enumerate(_groups(files)):
            job = partial(_upload_pack, transfer, root, group, blob_name(number), found)
            batch.submit(job, sum(file.size for file in group))
    return found


def _upload_pack(
    transfer: Transfer, root: Path, group: Sequence[LocalFile], blob_id: str, found: dict[str, FileIndex]
) -> None:
    content = [read_file(root, file) for file in group]
    transfer.put(blob_id, b"".join(data for data, _ in content))
    offset = 0
    for file, (_, digest) in zip(group, content, strict=True):
        part = BlobRef(blob_id, file.size, digest, offset)
        found[file.path] = FileIndex(file.path.rpartition("/")[2], file.size, digest, parts=(part,))
        offset += file.size


def _groups(files: Iterable[LocalFile]) -> Iterator[list[LocalFile]]:
    group: list[LocalFile] = []
    size = 0
    for file in files:
        if group and size + file.size > PACK_SIZE:
            yield group
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        yield group
