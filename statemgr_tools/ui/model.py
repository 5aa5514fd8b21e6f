"""The data of the pages beyond an overview: checkpoints of a task, keys of a store, blobs, metrics. Reads only.

Everything is bounded: a task shows its newest checkpoints, a store is restored for a look-up only up to a size, one
store is open at a time, and a scan returns a page of keys. Checks of the complete blob store run in the background,
one of each kind at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import TypeVar

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.config import JobConfig
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.errors import ConfigError, CorruptError, InvalidError, MissingError, StatemgrError, UnavailableError
from statemgr.health.diagnosis import PATIENCE_S, Diagnosis
from statemgr.health.overview import JobMonitor, JobOverview
from statemgr.health.problems import Problem, in_order, of_error
from statemgr.health.processes import Fill, Processes, Sample
from statemgr.health.slow_reads import Answer, Patient
from statemgr.health.stages import size_of
from statemgr.model.checkpoint import BlobMarker, ChangelogMarker, Checkpoint, CheckpointRecord, Marker
from statemgr.ports import ReadableStore
from statemgr_tools.ui.checks import Checks, Run
from statemgr_tools.ui.history import History, Point, point

T = TypeVar("T")
#: Number of a task's newest checkpoints on its page.
MOST_CHECKPOINTS = 50
#: Keys on one page of a scan.
PAGE = 50
#: Seconds for which an overview is reused, so that many browsers cost no more than one.
_FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class StoreLine:
    """A store in a checkpoint, in one backend.

    Attributes:
        where: the place that the marker names.
        size: bytes of the snapshot and of the segments. None for a changelog.
        segments: their number. None for a changelog.
        uploaded: bytes of the blobs that this commit added. None for a changelog, whose records are in the transaction.
        problem: the reason why the blobs could not be read.
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
    """A page of keys and values in key order, and the key at which the next page begins, if there is one."""

    items: tuple[tuple[bytes, bytes], ...]
    following: bytes | None


@dataclass(frozen=True, slots=True)
class Look:
    """A job at a glance.

    Attributes:
        overview: the newest one, which may be old if ``error`` is set. None if there has been none yet.
        error: why there is no newer one. ``waiting_s``: how long the view has waited for it.
        problems: the problems, causes first.
    """

    overview: JobOverview | None
    error: StatemgrError | None
    waiting_s: float | None
    problems: tuple[Problem, ...]


@dataclass
class _Open:
    """The open store, and the stack that closes it and deletes its files."""

    name: tuple[str, str, str]
    store: ReadableStore
    closing: ExitStack = field(repr=False)


class JobView:
    """One job for the pages. Safe to use from many threads; close it when done.

    Args:
        metrics: addresses of the metrics of the job's processes.
        most_bytes: a larger store is not restored for a look-up.
        others: names of other jobs whose processes are also at these addresses.
    """

    def __init__(
        self,
        config: JobConfig,
        metrics: Sequence[str] = (),
        most_bytes: int = 1 << 30,
        others: Collection[str] = (),
    ) -> None:
        self.config = config
        self.monitor = JobMonitor(config)
        self.metrics = tuple(metrics)
        self._most_bytes = most_bytes
        self._looking = threading.Lock()
        self.checks = Checks(config, self.monitor.services)
        self._diagnosis = Diagnosis(self.monitor)
        self._overview = Patient(self._read, self.monitor.services.clock, _FRESH_S)
        self._records = Patient(self.monitor.reader.records, self.monitor.services.clock, fresh_s=0)
        self._newest: JobOverview | None = None
        self._processes = Processes(self.metrics, config.job_name, self.monitor.services.clock, others)
        self._open: _Open | None = None
        self.history = History(self._point)

    @property
    def runs(self) -> Mapping[str, Run]:
        """The last run of each check of the complete blob store, by its name."""
        return self.checks.runs

    @property
    def now_ms(self) -> int:
        """Return epoch milliseconds by this machine's clock."""
        return self.monitor.services.clock.time_ns() // 1_000_000

    def overview(self) -> JobOverview:
        """Return the job now, or up to a second ago. Raises: as :meth:`JobMonitor.overview`, after a few seconds."""
        answer = self._overview.ask(PATIENCE_S)
        # while a new one takes long, the one before it is better than none
        return _answered(answer if answer.value is None else replace(answer, waiting_s=None))[0]

    def begin(self) -> None:
        """Ask all servers what :meth:`look` returns, and wait for no answer."""
        self._overview.ask(0)
        self._processes.ask()
        self._diagnosis.begin()

    def look(self) -> Look:
        """Return the job at a glance. Waits only a few seconds for servers that do not answer, and raises nothing."""
        self.begin()
        problems = self._diagnosis.servers()
        answer = self._overview.ask(PATIENCE_S)
        if answer.value is not None:
            self._newest = answer.value[0]
            problems += answer.value[1]
        if answer.error is not None:
            problems.append(of_error(answer.error, self.config))
        problems += self._processes.problems()
        problems += self.checks.problems()
        return Look(self._newest, answer.error, answer.waiting_s, tuple(in_order(problems)))

    def _point(self) -> Point | None:
        try:
            found = self.overview()  # and not look(): it checks damaged blobs again while somebody looks
        except StatemgrError:
            return None
        return point(self.now_ms, found.lag, self.samples()[0])

    def _read(self) -> tuple[JobOverview, list[Problem]]:
        found = self.monitor.overview()
        return found, self._diagnosis.tasks(found)

    # --- a task ---------------------------------------------------------------------------------------------

    def record(self, task: str) -> CheckpointRecord:
        """Return the newest record of a task. Raises: MissingState; after a few seconds, UnavailableError."""
        found = _answered(self._records.ask(PATIENCE_S)).get(task)
        return found or self.monitor.reader.retaining(tasks=[task])[0]  # which says what is wrong

    def blobs_gone(self, record: CheckpointRecord) -> str | None:
        """Return why the blobs of a task cannot be read now. Waits only a few seconds."""
        gone = self._diagnosis.blobs_gone(record)
        return None if gone is None else f"the blob store cannot be read: {gone.part}. {gone.detail}"

    def timeline(self, record: CheckpointRecord, *, with_blobs: bool) -> list[CheckpointLine]:
        """Return the newest retained checkpoints of a task, newest first. Raises: UnavailableError, AccessDenied."""
        shown = record.checkpoints[: MOST_CHECKPOINTS + 1]
        times = [one.published_ms or one.checkpoint_id.millis for one in shown]
        gaps = [(later - earlier) / 1000 for later, earlier in pairwise(times)] + [None]
        return [
            CheckpointLine(one, at, gap, tuple(self._stores(record.task, one, with_blobs)))
            for one, at, gap in zip(shown, times, gaps, strict=True)
        ][:MOST_CHECKPOINTS]

    def _stores(self, task: str, checkpoint: Checkpoint, with_blobs: bool) -> Iterator[StoreLine]:
        for factory, stores in sorted(checkpoint.state_checkpoint_markers.items()):
            for store, marker in sorted(stores.items()):
                yield self._store(task, store, factory, marker, with_blobs)

    def _store(self, task: str, store: str, factory: str, marker: Marker, with_blobs: bool) -> StoreLine:
        if isinstance(marker, ChangelogMarker):
            return StoreLine(store, factory, f"{marker.topic}-{marker.partition} up to offset {marker.offset}")
        if not isinstance(marker, BlobMarker):
            return StoreLine(store, factory, f"{len(marker.data)} bytes of another backend")
        if not with_blobs:
            return StoreLine(store, factory, "not read")
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
        """Return the value of a key. Raises: as :meth:`scan`."""
        return self._look(task, store, checkpoint_id, lambda opened: opened.get(key))

    def scan(self, task: str, store: str, checkpoint_id: str, start: bytes | None, end: bytes | None) -> Found:
        """Return a page of the keys with ``start`` ≤ key < ``end``.

        Raises: InvalidError if the store is too large to be restored for this; as :meth:`JobReader.open_store`.
        """

        def read(opened: ReadableStore) -> Found:
            items = list(islice(opened.scan(start, end), PAGE + 1))
            return Found(tuple(items[:PAGE]), items[PAGE][0] if len(items) > PAGE else None)

        return self._look(task, store, checkpoint_id, read)

    def _look(self, task: str, store: str, checkpoint_id: str, read: Callable[[ReadableStore], T]) -> T:
        if not self._looking.acquire(timeout=PATIENCE_S):
            raise UnavailableError(
                "another look-up is fetching its store", hint="reload the page in a minute", task=task, store=store
            )
        try:
            name = (task, store, checkpoint_id)
            if self._open is None or self._open.name != name:
                self._close_store()
                self._check_size(task, store, checkpoint_id)
                with ExitStack() as stack:
                    opened = stack.enter_context(self.monitor.reader.open_store(task, store, checkpoint_id))
                    self._open = _Open(name, opened, stack.pop_all())
            return read(self._open.store)
        finally:
            self._looking.release()

    def _check_size(self, task: str, store: str, checkpoint_id: str) -> None:
        """Raises: InvalidError if a restore would fetch too much, from the first backend that has the checkpoint."""
        checkpoint = self.monitor.reader.checkpoint(task, checkpoint_id)
        for factory in self.config.store(store).restore_factories:
            marker = checkpoint.marker(factory, store)
            if marker is None:
                continue
            if factory == BLOB_STORE and (gone := self.blobs_gone(self.record(task))) is not None:
                raise UnavailableError(gone, hint="the page of the tasks says what is wrong", task=task, store=store)
            try:
                found = size_of(self.monitor.services, Catalogue(self.monitor.services.transfer), task, store, marker)
            except (MissingError, CorruptError, ConfigError):
                continue  # the restore takes the next one, too
            if found is not None and found > self._most_bytes:
                about = "about " if factory == KAFKA_CHANGELOG else ""
                raise InvalidError(
                    f"{factory} has {about}{found:,} bytes of the store, and a look-up may fetch all of them to this "
                    "machine",
                    hint="start the page with a larger --most-bytes, or use `statemgr store get`",
                    task=task,
                    store=store,
                )
            return

    def _close_store(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.closing.close()

    # --- the whole blob store -------------------------------------------------------------------------------

    def start(self, kind: str) -> None:
        """Start a check in the background, unless it already runs. Raises: InvalidError if there is no such check."""
        self.checks.start(kind)

    def samples(self) -> tuple[list[Sample], list[str]]:
        """Return the job's numbers from the metrics of its processes, and why an address could not be read."""
        return self._processes.samples()

    def fills(self) -> list[Fill]:
        """Return what is still to come of open stores, from the metrics of the job's processes."""
        return self._processes.fills()

    def close(self) -> None:
        """Close clients and the open store. Running checks, and a look-up that still fetches a store, end with an
        error."""
        self.history.close()
        if self._looking.acquire(timeout=PATIENCE_S):
            self._close_store()
            self._looking.release()
        self._diagnosis.close()
        self.monitor.close()


def _answered(answer: Answer[T]) -> T:
    """Return the value of a read. Raises: its error; UnavailableError if it still runs."""
    if answer.error is not None:
        raise answer.error
    if answer.value is None or answer.waiting_s is not None:
        raise UnavailableError(
            f"the brokers have not answered for {answer.waiting_s or 0:.0f} s", hint="reload the page in a minute"
        )
    return answer.value
