"""The directory diff: which files a commit uploads, and which it keeps. Pure.

Two files are the same if their content is (size and hash). Names say nothing, because RocksDB uses file numbers again.
A file whose size occurs nowhere else is certainly new. The diff does not need its hash, which the upload computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from statemgr.model.snapshot import DirIndex, FileIndex


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of a local directory: path relative to its root, size in bytes, XXH3-128 of its content, and status.

    The hash may be None only if :func:`comparable` does not list the path.
    """

    path: str
    size: int
    hash: bytes | None
    mode: int = 0o600
    modified_ms: int = 0


@dataclass(frozen=True, slots=True)
class LocalTree:
    """A local directory: its files, and all sub-directories (empty ones, too), by relative path."""

    files: tuple[LocalFile, ...]
    dirs: tuple[str, ...] = ()


def comparable(sizes: Mapping[str, int], base: DirIndex | None) -> set[str]:
    """The paths of files that have the size of another local file or of one in the base, and so may be the same."""
    count = Counter(sizes.values())
    count.update({file.size for _, file in base.walk()} if base else ())
    return {path for path, size in sizes.items() if count[size] > 1}


def diff(local: LocalTree, base: DirIndex | None) -> tuple[tuple[LocalFile, ...], dict[str, FileIndex]]:
    """Compare a local directory with the directory of the last acknowledged index (None: everything is new).

    Returns: the local files whose content the base lacks; and relative path → the base's file with the same content.
    """
    known: dict[tuple[int, bytes | None], FileIndex] = {f.identity: f for _, f in base.walk()} if base else {}
    added: list[LocalFile] = []
    kept: dict[str, FileIndex] = {}
    for file in local.files:
        same = known.get((file.size, file.hash))
        if same is None:
            added.append(file)
        else:
            kept[file.path] = same
    return tuple(added), kept


def assemble(local: LocalTree, files: Mapping[str, FileIndex]) -> DirIndex:
    """Build the index of a local directory; ``files`` says where the content of each path is.

    Names, modes and times are those of the local file, which may differ from those of the stored file with the same
    content.
    """
    status = {file.path: (file.mode, file.modified_ms) for file in local.files}
    from_root: dict[str, tuple[dict[str, FileIndex], set[str]]] = {"": ({}, set())}

    def enter(path: str) -> tuple[dict[str, FileIndex], set[str]]:
        if path not in from_root:
            parent, _, name = path.rpartition("/")
            enter(parent)[1].add(name)
            from_root[path] = ({}, set())
        return from_root[path]

    for path in local.dirs:
        enter(path)
    for path, file in files.items():
        parent, _, name = path.rpartition("/")
        mode, modified_ms = status[path]
        enter(parent)[0][name] = replace(file, name=name, mode=mode, modified_ms=modified_ms)

    def build(path: str, name: str) -> DirIndex:
        found, subs = from_root[path]
        return DirIndex(
            name,
            tuple(found[n] for n in sorted(found)),
            tuple(build(f"{path}/{sub}" if path else sub, sub) for sub in sorted(subs)),
        )

    return build("", "")
