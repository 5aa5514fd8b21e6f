"""What the pages show beyond an overview: checkpoints of a task, keys of a store, blobs, metrics. Reads only.

Everything is bounded: a task shows its newest checkpoints, a store is restored for a look-up only up to a size, one
store is open at a time, and a scan returns a page of keys. Checks of the whole blob store run in the background, one of
each kind at a time.
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.cli.overview import JobMonitor, JobOverview
from statemgr.config import JobConfig
from statemgr.config.factories import BLOB_STORE
from statemgr.errors import ConfigError, CorruptError, InvalidError, MissingError, StatemgrError
from statemgr.flows.gc import GarbageReport, collect_garbage
from statemgr.flows.migration import positions, survey
from statemgr.flows.verify_blobs import Verified, verify_blobs
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model.checkpoint import BlobMarker, BlobRef, ChangelogMarker, Checkpoint, CheckpointRecord, Marker
from statemgr.ports import LocalStore, Progress

T = TypeVar("T")
#: Checkpoints of a task that are shown, the newest first.
MOST_CHECKPOINTS = 50
#: Keys on one page of a scan.
PAGE = 50
#: Seconds for which an overview is shown again: many browsers cost no more than one.
_FRESH_S = 1.0
_METRICS_S = 2.0
_METRICS_BYTES = 8 * 1024 * 1024
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class StoreLine:
    """A store in a checkpoint, in one backend.

    Attributes:
        where: what the marker names.
        size: bytes of the snapshot and of the segments. None for a changelog.
        segments: their number. None for a changelog.
        uploaded: bytes of the blobs that this commit added. None for a changelog, whose records are in the transaction.
        problem: why the blobs could not be read.
    """

    store: str
    factory: str
    where: str
    size: int | None = None
    segments: int | None = None
    uploaded: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointLine:
    """A retained checkpoint and its stores. ``gap_s``: seconds since the retained checkpoint before it."""

    checkpoint: Checkpoint
    published_ms: int
    gap_s: float | None
    stores: tuple[StoreLine, ...]

    @property
    def uploaded(self) -> int:
        """Bytes of all blobs that the commit added."""
        return sum(line.uploaded or 0 for line in self.stores)


@dataclass(frozen=True, slots=True)
class Found:
    """A page of keys and values in key order, and the key with which the next page begins, if there is one."""

    items: tuple[tuple[bytes, bytes], ...]
    following: bytes | None


@dataclass(frozen=True, slots=True)
class BlobBytes:
    """All blobs below the job's prefix. ``live``: bytes that the current checkpoints need."""

    report: GarbageReport
    live: int


@dataclass
class Run:
    """A check of the whole blob store that runs, or the last one. Times are epoch milliseconds."""

    started_ms: int
    progress: str = "starting"
    ended_ms: int | None = None
    result: BlobBytes | Verified | None = None
    error: StatemgrError | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One number from the metrics of a running process."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass
class _Open:
    """The store that is open, and what closes it and deletes its files."""

    name: tuple[str, str, str]
    store: LocalStore
    closing: ExitStack = field(repr=False)


class JobView:
    """One job for the pages. Safe to use from many threads; close it when done.

    Args:
        metrics: addresses of the metrics of the job's processes.
        most_bytes: a store with more bytes is not restored for a look-up.
    """

    def __init__(self, config: JobConfig, metrics: Sequence[str] = (), most_bytes: int = 1 << 30) -> None:
        self.config = config
        self.monitor = JobMonitor(config)
        self.metrics = tuple(metrics)
        self.runs: dict[str, Run] = {}
        self._most_bytes = most_bytes
        self._reading, self._looking, self._starting = threading.Lock(), threading.Lock(), threading.Lock()
        self._overview: tuple[float, JobOverview] | None = None
        self._open: _Open | None = None

    @property
    def now_ms(self) -> int:
        """Epoch milliseconds by this machine's clock."""
        return self.monitor.services.clock.time_ns() // 1_000_000

    def overview(self) -> JobOverview:
        """The job now, or up to a second ago. Raises: as :meth:`JobMonitor.overview`."""
        with self._reading:
            now_s = self.monitor.services.clock.monotonic()
            if self._overview is None or now_s - self._overview[0] > _FRESH_S:
                self._overview = now_s, self.monitor.overview()
            return self._overview[1]

    # --- a task ---------------------------------------------------------------------------------------------

    def record(self, task: str) -> CheckpointRecord:
        """The newest record of a task. Raises: MissingState."""
        return self.monitor.reader.retaining(tasks=[task])[0]

    def timeline(self, record: CheckpointRecord) -> list[CheckpointLine]:
        """The newest retained checkpoints of a task, newest first. Raises: UnavailableError, AccessDenied."""
        shown = record.checkpoints[: MOST_CHECKPOINTS + 1]
        times = [one.published_ms or one.checkpoint_id.millis for one in shown]
        gaps = [(later - earlier) / 1000 for later, earlier in pairwise(times)] + [None]
        return [
            CheckpointLine(one, at, gap, tuple(self._stores(record.task, one)))
            for one, at, gap in zip(shown, times, gaps, strict=True)
        ][:MOST_CHECKPOINTS]

    def _stores(self, task: str, checkpoint: Checkpoint) -> Iterator[StoreLine]:
        for factory, stores in sorted(checkpoint.state_checkpoint_markers.items()):
            for store, marker in sorted(stores.items()):
                yield self._store(task, store, factory, marker)

    def _store(self, task: str, store: str, factory: str, marker: Marker) -> StoreLine:
        if isinstance(marker, ChangelogMarker):
            return StoreLine(store, factory, f"{marker.topic}-{marker.partition} up to offset {marker.offset}")
        if not isinstance(marker, BlobMarker):
            return StoreLine(store, factory, f"{len(marker.data)} bytes of another backend")
        try:
            chain = self.monitor.reader.chain(task, store, marker)
            index = self.monitor.reader.snapshot(task, store, chain.snapshot.index)
        except (MissingError, CorruptError, ConfigError) as error:
            return StoreLine(store, factory, "", problem=error.message)
        own = {ref for ref in chain.blobs() if ref.blob_id in chain.added}
        if marker.blob is not None:
            own.add(marker.blob)
        uploaded = sum(ref.size for ref in own)
        if chain.snapshot.index in own:
            added = {ref.blob_id for ref in index.added()}
            files = (stored for _, file in index.root.walk() for stored in file.stored())
            uploaded += sum(size for ref, size in files if ref.blob_id in added)
        size = index.root.size + sum(segment.size for segment in chain.segments)
        return StoreLine(store, factory, chain.snapshot.index.blob_id, size, len(chain.segments), uploaded)

    # --- keys -----------------------------------------------------------------------------------------------

    def get(self, task: str, store: str, checkpoint_id: str, key: bytes) -> bytes | None:
        """The value of a key. Raises: as :meth:`scan`."""
        return self._look(task, store, checkpoint_id, lambda opened: opened.get(key))

    def scan(self, task: str, store: str, checkpoint_id: str, start: bytes | None, end: bytes | None) -> Found:
        """A page of the keys with ``start`` ≤ key < ``end``.

        Raises: InvalidError if the store is too large to restore it for this; as :meth:`JobReader.open_store`.
        """

        def read(opened: LocalStore) -> Found:
            items = list(islice(opened.scan(start, end), PAGE + 1))
            return Found(tuple(items[:PAGE]), items[PAGE][0] if len(items) > PAGE else None)

        return self._look(task, store, checkpoint_id, read)

    def _look(self, task: str, store: str, checkpoint_id: str, read: Callable[[LocalStore], T]) -> T:
        with self._looking:
            name = (task, store, checkpoint_id)
            if self._open is None or self._open.name != name:
                self._close_store()
                self._check_size(task, store)
                with ExitStack() as stack:
                    opened = stack.enter_context(self.monitor.reader.open_store(task, store, checkpoint_id))
                    self._open = _Open(name, opened, stack.pop_all())
            return read(self._open.store)

    def _check_size(self, task: str, store: str) -> None:
        services = self.monitor.services
        found = survey(services, positions(services, [self.record(task)], [store]))
        size = max((one.size for one in found), default=0)
        if size > self._most_bytes:
            raise InvalidError(
                f"the store has {size:,} bytes, and a look-up would restore all of them on this machine",
                hint="start the page with a larger --most-bytes, or use `statemgr store get`",
                task=task,
                store=store,
            )

    def _close_store(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.closing.close()

    # --- the whole blob store -------------------------------------------------------------------------------

    def start(self, kind: str) -> None:
        """Start ``verify`` or ``blobs`` in the background, unless it runs already. Raises: InvalidError."""
        work: dict[str, Callable[[Progress], BlobBytes | Verified]] = {"verify": self._verify, "blobs": self._blobs}
        if kind not in work:
            raise InvalidError("there is no such check", hint="choose one on the page")
        with self._starting:
            known = self.runs.get(kind)
            if known is None or known.ended_ms is not None:
                run = self.runs[kind] = Run(self.now_ms)
                threading.Thread(target=self._run, args=(run, work[kind]), daemon=True).start()

    def _run(self, run: Run, work: Callable[[Progress], BlobBytes | Verified]) -> None:
        def progress(what: str, done: int, total: int) -> None:
            run.progress = f"{what}: {done:,} of {total:,}" if total else f"{what}: {done:,}"

        try:
            run.result = work(progress)
        except StatemgrError as error:
            run.error = error
        except Exception as error:  # shown on the page: nobody waits for the thread
            run.error = StatemgrError(f"{type(error).__name__}: {error}")
        run.ended_ms = self.now_ms

    def _verify(self, progress: Progress) -> Verified:
        services = self.monitor.services
        with closing(CheckpointTopic(self.config, services.clock)) as log:
            return verify_blobs(services, log.read, (), 0.0, progress)

    def _blobs(self, progress: Progress) -> BlobBytes:
        services = self.monitor.services
        with closing(CheckpointTopic(self.config, services.clock)) as log:
            report = collect_garbage(services, log, progress)
            records = list(log.read().values())
        catalogue = Catalogue(services.transfer)

        def needed(record: CheckpointRecord) -> dict[BlobRef, int]:
            current = record.current
            found: dict[BlobRef, int] = {}
            for store, marker in current.state_checkpoint_markers.get(BLOB_STORE, {}).items():
                found.update(catalogue.needed(services.identity(record.task, store), marker))
            return found | {one.blob: one.blob.size for one in current.attachments if one.blob is not None}

        live: dict[BlobRef, int] = {}
        with services.executors.pool("live", _AT_ONCE) as pool:
            for one in pool.map(needed, records):
                live.update(one)
        return BlobBytes(report, sum(live.values()))

    # --- metrics --------------------------------------------------------------------------------------------

    def samples(self) -> tuple[list[Sample], list[str]]:
        """The numbers of the job from the processes' metrics, and why an address could not be read."""
        found, problems = [], []
        for address in self.metrics:
            try:
                with urllib.request.urlopen(address, timeout=_METRICS_S) as answer:
                    text = answer.read(_METRICS_BYTES).decode()
                for family in text_string_to_metric_families(text):
                    found += [
                        Sample(one.name, one.labels, one.value)
                        for one in family.samples
                        if one.labels.get("job") == self.config.job_name and not one.name.endswith("_created")
                    ]
            except (OSError, ValueError) as error:
                problems.append(f"the metrics at {address} cannot be read: {error}")
        return found, problems

    def close(self) -> None:
        """Close clients and the open store. Checks that run end with an error."""
        with self._looking:
            self._close_store()
        self.monitor.close()
