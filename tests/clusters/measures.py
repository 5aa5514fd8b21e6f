"""Whether processes and stores grow: samples of memory, descriptors, threads, disk and blobs."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

#: What a process may use more in its last third than in its second third, as a part and in addition.
_LIMITS = {"MiB": (1.15, 60.0), "descriptors": (1.1, 10.0), "threads": (1.1, 10.0)}
#: The beginning of the names of two pools of a JVM with Spark. Each call adds a thread until there are 100 and 128.
_SPARKS_POOLS = "block-manager-"
#: As many samples of each third are compared at least.
_FEWEST = 3
#: Processes that have lived for less time say nothing: on a busy machine a driver of Spark starts for a minute or two.
_SHORTEST_S = 240.0


def disk_bytes(directory: Path) -> int:
    """Return what the files below a directory take. A file with several links counts once."""
    sizes: dict[int, int] = {}
    for parent, _, names in os.walk(directory):  # passes over what vanishes, unlike rglob
        for name in names:
            with suppress(OSError):
                found = os.lstat(os.path.join(parent, name))
                sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def _threads(process: int) -> list[str]:
    """Return the first 15 characters of the names of a process's threads."""
    found = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found.append((task / "comm").read_text())
    return found


@dataclass
class Measures:
    """Samples: process → name → (open stores, value) in the order of time, and name → bytes of all samples.

    A member gets tasks and loses them, and its clients and threads with them. So values are compared that were seen
    with the same number of open stores. Descriptors of files do not count: a store has as many as it has tables.
    """

    processes: dict[tuple[int, float], dict[str, list[tuple[int, float]]]] = field(default_factory=dict)
    lives: dict[tuple[int, float], tuple[float, float]] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def sample(self, process: psutil.Process) -> None:
        """Look at a process."""
        try:
            of = process.pid, process.create_time()
            files = [file.path for file in process.open_files()]
            found = {
                "MiB": process.memory_info().rss / 1024**2,
                "descriptors": process.num_fds() - len(files),
                "threads": sum(not name.startswith(_SPARKS_POOLS) for name in _threads(process.pid)),
            }
        except (psutil.Error, OSError):
            return
        values = self.processes.setdefault(of, defaultdict(list))
        now = time.monotonic()
        self.lives[of] = self.lives.get(of, (now, now))[0], now
        for name, value in found.items():
            values[name].append((sum(file.endswith("/LOCK") for file in files), value))

    def growth(self) -> tuple[list[str], list[str]]:
        """Compare the second and the last third of each long life. Returns: a line for each process, and what grows."""
        told, grown = [], []
        for of, values in self.processes.items():
            seconds = self.lives[of][1] - self.lives[of][0]
            if seconds < _SHORTEST_S:
                continue
            parts = []
            for name, (most, more) in _LIMITS.items():
                for stores, before, after in _medians(values[name]):
                    what = f"{name} with {stores} stores {before:.0f} → {after:.0f}"
                    parts.append(what)
                    if after > before * most + more:
                        grown.append(f"process {of[0]}: {what} in {seconds:.0f} s")
            told.append(f"process {of[0]}, {seconds / 60:.0f} min: {', '.join(parts)}")
        for name, sizes in self.sizes.items():
            third = len(sizes) // 3
            if third < 2:
                continue
            before, after = statistics.median(sizes[third : 2 * third]), statistics.median(sizes[2 * third :])
            told.append(f"{name}: {before / 1e6:.1f} → {after / 1e6:.1f} MB")
            if after > before * 1.5 + 20e6:
                grown.append(f"{name}: {before / 1e6:.1f} → {after / 1e6:.1f} MB")
        return told, grown


def _medians(values: list[tuple[int, float]]) -> Iterator[tuple[int, float, float]]:
    """For each number of open stores the medians of the second and of the last third."""
    third = len(values) // 3
    before, after = values[third : 2 * third], values[2 * third :]
    for stores in sorted({stores for stores, _ in values}):
        then, now = ([value for count, value in part if count == stores] for part in (before, after))
        if min(len(then), len(now)) >= _FEWEST:
            yield stores, statistics.median(then), statistics.median(now)
