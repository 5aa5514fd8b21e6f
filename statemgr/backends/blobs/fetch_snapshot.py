"""A snapshot's index becomes a verified directory.

Steps:

1. make the staging directory, and its sub-directories
2. reuse local files of the same content and mode by hard link, write the inline ones, fetch the rest in parallel; of
   files that an earlier try left unfinished, fetch only the parts that are not right
3. set the owner's bits of each file's mode; group and others get none
4. verify: exactly the index's files, each of its size; hashes were checked as the bytes arrived

Nothing is synced here: whoever takes the directory over does what it takes to rely on it.

Touches the staging directory only, which must not exist and is left to the caller when a step fails.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from statemgr.errors import CorruptBlob, CorruptError, DiskFull
from statemgr.local.durable import PRIVATE
from statemgr.local.transfer_files import disk_errors, write_new
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash
from statemgr.model.plan import FilePlan, plan_files
from statemgr.model.snapshot import FileIndex, SnapshotIndex
from statemgr.os_errors import CANNOT_LINK
from statemgr.phases import Phase, announce
from statemgr.ports import Restored, RestoreRequest
from statemgr.transfer.plan import Fetch
from statemgr.transfer.transfer import Transfer

_CANNOT_LINK = CANNOT_LINK | {errno.ENOENT}


def fetch_snapshot(transfer: Transfer, index: SnapshotIndex, ref: BlobRef, request: RestoreRequest) -> Restored:
    """Bring the directory that an index (of the blob ``ref``) describes into ``request.staging``.

    ``bytes_fetched`` has the index in it. Raises: MissingBlob, CorruptBlob, UnavailableError, AccessDenied, DiskFull.
    """
    subject, job = f"{request.identity.task}/{request.identity.store}", request.identity.job_key
    plan = plan_files(index.root, [directory.files for directory in request.reusable])

    announce(Phase.FETCH, subject, job)
    left = _left_files(request.leftovers)
    _make_directories(request.staging, plan, sum(left[path][1] for path in plan.fetch if path in left))
    linked, missing = _link(request, plan, dict(index.root.walk()))
    _write_inline(request.staging, plan, ref.blob_id)
    fetches = {**plan.fetch, **missing}
    kept = transfer.fetch_files(
        [
            Fetch(file, request.staging / path, continued=_taken_over(left.get(path), request.staging / path, file))
            for path, file in fetches.items()
        ],
        request.progress,
    )

    _set_modes(request.staging, index)
    announce(Phase.VERIFY, subject, job)
    _verify(request.staging, index, ref.blob_id)
    return Restored(
        files={path: file.identity for path, file in index.root.walk()},
        bytes_fetched=ref.size + sum(file.size for file in fetches.values()) - kept,
        bytes_reused=linked + kept,
    )


def _left_files(leftovers: Sequence[Path]) -> dict[str, tuple[Path, int]]:
    """Relative path → a file of that name that an earlier try left, and its size."""
    found: dict[str, tuple[Path, int]] = {}
    for leftover in leftovers:
        for directory, _, names in os.walk(leftover):
            for name in names:
                path = Path(directory, name)
                with suppress(OSError):
                    found[path.relative_to(leftover).as_posix()] = path, path.lstat().st_size
    return found


def _taken_over(left: tuple[Path, int] | None, target: Path, file: FileIndex) -> bool:
    """Move a file that an earlier try left to where it belongs. False where that is of no use."""
    if left is None or left[1] != file.size or not file.parts:
        return False
    try:
        os.rename(left[0], target)
    except OSError:
        return False  # another try was faster
    status = target.lstat()
    # written to only if no other directory has it, too
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size == file.size:
        os.chmod(target, PRIVATE)
        return True
    target.unlink()
    return False


def _make_directories(staging: Path, plan: FilePlan, there: int) -> None:
    with disk_errors(staging):
        staging.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(staging.parent).free
        needed = plan.fetch_bytes - there
        if free < needed:
            raise DiskFull(
                f"the restore needs {needed} bytes, but only {free} are free",
                hint="free space and try again", path=staging,
            )  # fmt: skip
        # mkdir fails where something stands already: nothing planted is ever entered
        staging.mkdir()
        for path in plan.dirs:
            (staging / path).mkdir()


def _link(request: RestoreRequest, plan: FilePlan, files: Mapping[str, FileIndex]) -> tuple[int, dict[str, FileIndex]]:
    """Hard-link what is here. Returns the bytes reused, and the files that have to be fetched after all."""
    reused = 0
    missing: dict[str, FileIndex] = {}
    for path, (number, source) in plan.link.items():
        target = request.staging / path
        with disk_errors(target):
            if _linked(request.reusable[number].path / source, target, files[path]):
                reused += files[path].size
            else:
                missing[path] = files[path]
    return reused, missing


def _linked(source: Path, target: Path, file: FileIndex) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _CANNOT_LINK:
            return False  # a cache may vanish at any time, or be on another file system
        raise
    found = target.lstat()
    same_mode = found.st_mode & stat.S_IRWXU == file.private_mode  # to set another one would change the source
    if stat.S_ISREG(found.st_mode) and found.st_size == file.size and same_mode:
        return True
    target.unlink()
    return False


def _write_inline(staging: Path, plan: FilePlan, index_blob: str) -> None:
    for path, file in plan.inline.items():
        data = file.inline or b""
        if content_hash(data) != file.hash:
            raise CorruptBlob("a file inside the index differs from what was committed", blob=index_blob, file=path)
        write_new(staging / path, data)


def _set_modes(staging: Path, index: SnapshotIndex) -> None:
    """New files are private already; most have no other mode."""
    with disk_errors(staging):
        for path, file in index.root.walk():
            if file.private_mode != PRIVATE:
                os.chmod(staging / path, file.private_mode)


def _verify(staging: Path, index: SnapshotIndex, index_blob: str) -> None:
    """The directory holds exactly the index's files and directories. Raises: CorruptError."""
    expected: dict[str, int | None] = {path: file.size for path, file in index.root.walk()}
    expected.update(dict.fromkeys(index.root.walk_dirs()))
    found: dict[str, int | None] = {}
    with disk_errors(staging):
        for directory, below, names in os.walk(staging):
            for name in (*below, *names):
                path = Path(directory, name)
                status = path.lstat()
                size = None if stat.S_ISDIR(status.st_mode) else status.st_size
                found[path.relative_to(staging).as_posix()] = (
                    size if size is None or stat.S_ISREG(status.st_mode) else -1
                )
    if found != expected:
        different = sorted(name for name, _ in found.items() ^ expected.items())[0]
        raise CorruptError(
            f"the restored directory differs from the index: {different!r}",
            hint="find out what else writes to state.dir", blob=index_blob, path=staging,
        )  # fmt: skip
