"""Watches a migrating job's stage, its waiting rows and the bytes of each backend, and draws them."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from statemgr import JobConfig
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.errors import StatemgrError
from statemgr.health.stages import positions, survey
from statemgr.reader import JobReader
from statemgr.wiring import open_services

_EVERY_S = 1.0
#: Number of characters of a curve, and the characters of its levels.
_WIDTH = 72
_LABELS = 36
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Sample:
    """The job at one moment, from its newest checkpoints. ``seconds`` count from the start; bytes are sums."""

    seconds: float
    stage: int
    tasks: int
    waiting_rows: int
    changelog_bytes: int
    blob_bytes: int


@dataclass
class Timeline:
    """The samples and the events, as ``(seconds, event)``. ``rows`` returns the number of rows sent to the input."""

    config: Path
    rows: Callable[[], int]
    samples: list[Sample] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Take samples in a thread until :meth:`stop`."""
        self._thread = threading.Thread(target=self._watch, name="timeline", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def mark(self, what: str) -> None:
        """Note an event of this moment: ``killed`` or ``rescaled``."""
        self.events.append((time.monotonic() - self._began, what))

    def to_dict(self) -> dict[str, Any]:
        """Return the data for ``--json``."""
        return {
            "samples": [asdict(sample) for sample in self.samples],
            "events": [{"seconds": seconds, "what": what} for seconds, what in self.events],
        }

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_S):
            try:
                sample = self._sample()
            except StatemgrError:
                continue  # there is no checkpoint yet, or a command is changing the job
            if sample is not None:
                self.samples.append(sample)

    def _sample(self) -> Sample | None:
        config = JobConfig.from_file(self.config)
        with closing(open_services(config)) as services, JobReader(config, only_settled=True) as reader:
            found = survey(services, positions(services, reader.retaining()))
        if not found:
            return None
        sizes = {
            factory: sum(one.held[factory].size or 0 for one in found if factory in one.held)
            for factory in (KAFKA_CHANGELOG, BLOB_STORE)
        }
        counted = sum(found[0].position.record.current.input_offsets.values())
        return Sample(
            seconds=time.monotonic() - self._began,
            stage=min((one.position.stage or 0) for one in found),
            tasks=len({one.position.record.task for one in found}),
            waiting_rows=max(self.rows() - counted, 0),
            changelog_bytes=sizes[KAFKA_CHANGELOG],
            blob_bytes=sizes[BLOB_STORE],
        )


def picture(timeline: Timeline, line: int) -> Table:
    """Draw stage, kills, tasks, waiting rows and bytes over time, for a terminal with this many characters per line."""
    width = max(10, min(_WIDTH, line - _LABELS))
    table = Table(title="The migration over time", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column("largest", justify="right", no_wrap=True)
    if not timeline.samples:
        return table
    end = max(timeline.samples[-1].seconds, *(seconds for seconds, _ in timeline.events), 1.0)
    columns = _columns(timeline.samples, end, width)
    marks = [" "] * width
    for seconds, what in timeline.events:
        marks[min(int(seconds / end * width), width - 1)] = {"killed": "✗", "rescaled": "⇄"}[what]
    table.add_row("stage", Text("".join(str(one.stage) for one in columns), "cyan"), "")
    table.add_row("✗ kill  ⇄ rescale", Text("".join(marks), "red"), "")
    table.add_row("tasks", Text("".join(str(one.tasks) for one in columns), "cyan"), "")
    for name, values in (
        ("rows that wait", [one.waiting_rows for one in columns]),
        ("bytes in changelogs", [one.changelog_bytes for one in columns]),
        ("bytes in blobs", [one.blob_bytes for one in columns]),
    ):
        table.add_row(name, Text(_curve(values), "green"), f"{max(values):,}")
    table.add_row("seconds", "0" + f"{end:.0f}".rjust(width - 1), "")
    return table


def save(timeline: Timeline, target: Path) -> None:
    """Write the picture as SVG."""
    console = Console(record=True, file=io.StringIO(), width=_WIDTH + _LABELS)
    console.print(picture(timeline, console.width))
    console.save_svg(str(target), title="statemgr demo --migrate", unique_id="migration")


def _columns(samples: Sequence[Sample], end: float, width: int) -> list[Sample]:
    """Return, for each column, the last sample before its end, or the first sample."""
    found, place = [], 0
    for column in range(width):
        while place + 1 < len(samples) and samples[place + 1].seconds <= (column + 1) * end / width:
            place += 1
        found.append(samples[place])
    return found


def _curve(values: Sequence[int]) -> str:
    top = max(values) or 1
    return "".join(_BARS[-(-value * (len(_BARS) - 1) // top)] for value in values)
