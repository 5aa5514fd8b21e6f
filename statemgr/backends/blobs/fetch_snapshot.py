"""Turns a snapshot's index into a verified directory.

Steps:

1. make the staging directory and its sub-directories
2. reuse local files of the same content and mode by hard link, write the inline ones, fetch the rest in parallel; of
   files that an earlier try left unfinished, fetch only the parts that are wrong
3. set the owner's bits of each file's mode; group and others get none
4. verify: exactly the index's files, each of its size; hashes were checked as the bytes arrived

Writes only to the staging directory, which must not exist. The caller removes it if a step fails, and makes it durable
if needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from statemgr.errors import CorruptBlob, CorruptError
from statemgr.local import fetched_tree
from statemgr.local.transfer_files import write_new
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash
from statemgr.model.plan import plan_files
from statemgr.model.snapshot import FileIndex, SnapshotIndex
from statemgr.phases import Phase
from statemgr.ports import Restored, RestoreRequest
from statemgr.transfer.downloads import Fetch
from statemgr.transfer.transfer import Transfer


def fetch_snapshot(transfer: Transfer, index: SnapshotIndex, ref: BlobRef, request: RestoreRequest) -> Restored:
    """Bring the directory that an index (in the blob ``ref``) describes into ``request.staging``.

    ``bytes_fetched`` includes the index. Raises: MissingBlob, CorruptBlob, UnavailableError, AccessDenied, DiskFull.
    """
    staging, files = request.staging, dict(index.root.walk())
    plan = plan_files(index.root, [directory.files for directory in request.reusable])
    request.identity.announce(Phase.FETCH)
    left = fetched_tree.left_files(request.leftovers)
    left_bytes = fetched_tree.bytes_left(left, {path: file.size for path, file in plan.fetch.items() if file.parts})
    fetched_tree.make(staging, plan.dirs, plan.fetch_bytes - left_bytes)  # 1

    fetches, linked = dict(plan.fetch), 0  # 2
    for path, (number, source) in plan.link.items():
        file = files[path]
        if fetched_tree.link(request.reusable[number].path / source, staging / path, file.size, file.private_mode):
            linked += file.size
        else:
            fetches[path] = file
    for path, file in plan.inline.items():
        data = file.inline or b""
        if content_hash(data) != file.hash:
            raise CorruptBlob("a file inside the index differs from what was committed", blob=ref.blob_id, file=path)
        write_new(staging / path, data)
    wanted = []
    for path, file in fetches.items():
        there, size = left.get(path, (None, 0))
        continued = False
        if there is not None and size == file.size and file.parts:
            continued = fetched_tree.take_over(there, staging / path, size)
        wanted.append(Fetch(file, staging / path, continued=continued))
    kept = transfer.fetch_files(wanted, request.progress)

    fetched_tree.set_modes(staging, {path: file.private_mode for path, file in files.items()})  # 3
    request.identity.announce(Phase.VERIFY)
    _verify(files, index, ref, request)  # 4
    return Restored(
        files={path: file.identity for path, file in files.items()},
        bytes_fetched=ref.size + sum(file.size for file in fetches.values()) - kept,
        bytes_reused=linked + kept,
    )


def _verify(files: Mapping[str, FileIndex], index: SnapshotIndex, ref: BlobRef, request: RestoreRequest) -> None:
    expected: dict[str, int | None] = {path: file.size for path, file in files.items()}
    expected |= dict.fromkeys(index.root.walk_dirs())
    found = fetched_tree.sizes(request.staging)
    if found != expected:
        different = sorted(name for name, _ in found.items() ^ expected.items())[0]
        raise CorruptError(
            f"the restored directory differs from the index: {different!r}",
            hint="find out what else writes to state.dir", blob=ref.blob_id, path=request.staging,
        )  # fmt: skip
