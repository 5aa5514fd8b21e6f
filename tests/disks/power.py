"""What a power loss leaves on a disk: only what was synced is sure to be there.

``faults.c`` records what an fsync makes durable: the content of a file, or the entries of a directory, by inode. From
this, :func:`lose_power` makes a new tree. A file that was never synced is empty, half there, or whole. An entry that
was made, renamed or removed after the last fsync of its directory is there or not.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from pathlib import Path


def settle(root: Path, shadow: Path) -> None:
    """Everything that is there now is durable."""
    shutil.rmtree(shadow, ignore_errors=True)
    for name in ("files", "dirs"):
        (shadow / name).mkdir(parents=True)
    for directory, names, files in os.walk(root):
        lines = [(name, "d") for name in names] + [(name, "f") for name in files]
        inode = os.lstat(directory).st_ino
        found = [f"{kind} {os.lstat(Path(directory, name)).st_ino} {name}\n" for name, kind in lines]
        (shadow / "dirs" / str(inode)).write_text("".join(found))
        for name in files:
            path = Path(directory, name)
            kept = shadow / "files" / str(os.lstat(path).st_ino)
            if not kept.exists():
                shutil.copyfile(path, kept)


def lose_power(root: Path, shadow: Path, chance: random.Random, more: float) -> int:
    """Replace a tree by one that a power loss may leave.

    Args:
        more: how probably something is there that was not synced. With 0, nothing of it is.

    Returns: how many files and directories differ from what a killed process would have left.
    """
    return _Loss(root, shadow, chance, more).run()


class _Loss:
    def __init__(self, root: Path, shadow: Path, chance: random.Random, more: float) -> None:
        self._root, self._shadow, self._chance, self._more = root, shadow, chance, more
        self._current = {path.lstat().st_ino: path for path in (root, *root.rglob("*"))}
        self._made: dict[int, Path] = {}
        self._differences = 0

    def run(self) -> int:
        target = self._root.with_name(f"{self._root.name}.after")
        target.mkdir(0o700)
        self._directory(self._root.lstat().st_ino, target)
        shutil.rmtree(self._root)
        target.rename(self._root)
        return self._differences

    def _survives(self) -> bool:
        return self._chance.random() < self._more

    def _directory(self, inode: int, target: Path) -> None:
        for kind, child, name in self._entries(inode):
            if kind == "d":
                (target / name).mkdir(0o700)
                self._directory(child, target / name)
            elif child in self._made:
                os.link(self._made[child], target / name)
            else:
                (target / name).write_bytes(self._content(child))
                (target / name).chmod(0o600)
                self._made[child] = target / name

    def _entries(self, inode: int) -> list[tuple[str, int, str]]:
        durable = self._shadow / "dirs" / str(inode)
        synced = [_entry(line) for line in durable.read_text().splitlines()] if durable.exists() else []
        current = self._current.get(inode)
        if current is None or not current.is_dir():
            return synced
        now = [
            ("d" if stat.S_ISDIR(path.lstat().st_mode) else "f", path.lstat().st_ino, path.name)
            for path in current.iterdir()
        ]
        if sorted(now) == sorted(synced) or self._survives():
            return now
        self._differences += 1
        return synced

    def _content(self, inode: int) -> bytes:
        durable, current = self._shadow / "files" / str(inode), self._current.get(inode)
        if current is not None and current.is_dir():
            current = None  # the file was removed, and its inode is used again
        synced = durable.read_bytes() if durable.exists() else b""
        now = current.read_bytes() if current is not None else synced
        if now == synced or self._survives():
            return now
        self._differences += 1
        if self._survives():  # the file has its length, but not all of its blocks
            size = self._chance.randrange(len(now) + 1)
            return now[:size] + bytes(len(now) - size)
        return synced


def _entry(line: str) -> tuple[str, int, str]:
    kind, inode, name = line.split(" ", 2)
    return kind, int(inode), name
