"""Reads a job's published state without disturbing it: fences nobody, and writes nothing to Kafka or to blobs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.config import JobConfig
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.errors import CorruptError, InvalidError, MissingError, MissingState, RetryableError
from statemgr.flows.opening.restore import StoreRestore, restore_store
from statemgr.flows.replaced_layouts import kept_by
from statemgr.flows.state_diff import KeyChange, Pair, compare, find_pairs
from statemgr.ids import task_index
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local import open_snapshot, snapshot_batches
from statemgr.local.directories import StoreDirectories
from statemgr.local.temporary import temporary_directory
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import BlobRef, Checkpoint, CheckpointRecord, Marker
from statemgr.model.jobs.layouts import RetiredLayout
from statemgr.model.jobs.offers import Offer, OfferKey
from statemgr.model.jobs.permissions import Permit
from statemgr.model.plan import StorePlan, plan_retained
from statemgr.model.snapshot import SnapshotIndex
from statemgr.os_errors import MISTYPED, disk_errors, translated
from statemgr.ports import LocalStore, Progress, ReadableStore, RestoreRequest, no_progress
from statemgr.services import Services
from statemgr.stores.expiry import as_published, live_items
from statemgr.wiring import open_services

log = logging.getLogger(__name__)
#: Bytes of a snapshot from which parts of it are fetched by need. Less takes about as long as ten requests.
_WORTH = 32 * 1024 * 1024
#: A record whose newest checkpoint was published less than this many milliseconds ago is not old: compaction keeps
#: deletes for at least a day (``delete.retention.ms``), and half of that is left for clocks.
_RECENT_MS = 12 * 3_600_000


class JobReader:
    """Reads the checkpoint topic, indexes and stores of a job that may be running. Close it when done.

    Args:
        only_settled: read the topic only up to the first open transaction. By default a read waits until that
            transaction ends, which takes ``task.commit.timeout.ms`` if its owner is dead.
        services: makes the adapters, the clock, the source of IDs and the threads.
    """

    def __init__(
        self,
        config: JobConfig,
        *,
        only_settled: bool = False,
        services: Callable[[JobConfig], Services] = open_services,
    ) -> None:
        self.config = config
        self._only_settled = only_settled
        self._services = services(config)
        self._catalogue = Catalogue(self._services.transfer)
        self._log = CheckpointTopic(config, self._services.clock)
        self._where = {"job": config.job_name, "topic": config.checkpoint_topic}

    def records(self) -> Mapping[str, CheckpointRecord]:
        """Task → its newest record. Raises: UnavailableError, CorruptRecord, MissingState (no such topic)."""
        return self._log.read(only_settled=self._only_settled)

    def permits(self) -> Sequence[Permit]:
        """The one-shot permissions that no opening had used up when the topic was read last."""
        return self._log.permits()

    def offers(self) -> Mapping[OfferKey, Offer]:
        """The offers of first snapshots that were on the topic when it was read last, also expired ones."""
        return self._log.offers()

    def replaced(self) -> Sequence[tuple[RetiredLayout, tuple[str, ...]]]:
        """The layouts that a rescale has replaced, oldest first as of the last read, and the checkpoints they keep."""
        return [(retired, kept_by(self._log, retired.layout.generation)) for retired in self._log.retired()]

    def history(self) -> Iterator[CheckpointRecord]:
        """Every committed record of the job that is still on the topic, oldest first."""
        return self._log.history()

    def tasks(self, checkpoint_id: str | None = None) -> list[str]:
        """The tasks that have a checkpoint, or retain this one, in order. Raises: MissingState if none does."""
        return [record.task for record in self.retaining(checkpoint_id)]

    def retaining(self, checkpoint_id: str | None = None, tasks: Sequence[str] = ()) -> list[CheckpointRecord]:
        """The records of ``tasks`` (default: of all that retain this checkpoint), in order, from one read of the topic.

        Raises: MissingState if there is none, or if a named task does not retain the checkpoint.
        """
        records = self.records()
        for task in tasks:
            self._find(records.get(task), task, checkpoint_id)
        if not records:
            raise MissingState(
                "the job has no checkpoint",
                hint="check job.name, job.id and task.checkpoint.topic, or wait for its first commit",
                **self._where,
            )
        found = [
            record
            for task, record in records.items()
            if (not tasks or task in tasks) and record.find(checkpoint_id) is not None
        ]
        if not found:
            retained = {str(c.checkpoint_id) for record in records.values() for c in record.checkpoints}
            hint = f"choose one of the retained checkpoints: {', '.join(sorted(retained))}"
            raise MissingState(f"checkpoint {checkpoint_id} is not retained for any task", hint=hint, **self._where)
        return sorted(found, key=lambda record: task_index(record.task))

    def checkpoint(self, task: str, checkpoint_id: str | None = None) -> Checkpoint:
        """A retained checkpoint of a task; the current one unless an ID is given. Raises: MissingState."""
        return self._find(self.records().get(task), task, checkpoint_id)

    def _find(self, record: CheckpointRecord | None, task: str, checkpoint_id: str | None) -> Checkpoint:
        if record is None:
            raise MissingState(
                "the topic has no checkpoint of the task",
                hint="run `statemgr checkpoints list` to see the checkpoints that exist",
                task=task,
                **self._where,
            )
        found = record.find(checkpoint_id)
        if found is None:
            hint = f"choose one of: {', '.join(str(c.checkpoint_id) for c in record.checkpoints)}"
            raise MissingState(f"checkpoint {checkpoint_id} is not retained", task=task, hint=hint)
        return found

    def index(self, task: str, store: str, checkpoint_id: str | None = None) -> SnapshotIndex:
        """The index of the newest snapshot of a store, which its segments continue, if it has any.

        Raises: MissingState, MissingBlob, CorruptBlob.
        """
        marker = self.checkpoint(task, checkpoint_id).marker(BLOB_STORE, store)
        if marker is not None:
            return self.snapshot(task, store, self.chain(task, store, marker).snapshot.index)
        raise MissingState("the checkpoint has no snapshot of the store in a blob store", task=task, store=store)

    def chain(self, task: str, store: str, marker: Marker) -> SegmentChain:
        """A store's snapshot and the segments after it. Raises: MissingState, MissingBlob, CorruptBlob."""
        return self._catalogue.chain(self._services.identity(task, store), marker)

    def snapshot(self, task: str, store: str, index: BlobRef) -> SnapshotIndex:
        """The snapshot that an index blob describes. Raises: MissingBlob, CorruptBlob."""
        return self._catalogue.index(self._services.identity(task, store), index)

    def restore(
        self,
        task: str,
        into: Path,
        checkpoint_id: str | None = None,
        stores: Sequence[str] | None = None,
        factories: Sequence[str] | None = None,
        progress: Progress = no_progress,
    ) -> list[StoreRestore]:
        """Restore stores of a task into ``into/<store>``, which must not exist yet; all or nothing per store. First
        removes what restores that were killed have left in ``into``.

        Raises: InvalidError, MissingState, CorruptError, UnavailableError, DiskFull.
        """
        record = self.records().get(task)
        checkpoint = self._find(record, task, checkpoint_id)
        assert record is not None
        return self._restore(record, checkpoint, into, stores, factories, progress)

    def _restore(
        self,
        record: CheckpointRecord,
        checkpoint: Checkpoint,
        into: Path,
        stores: Sequence[str] | None,
        factories: Sequence[str] | None,
        progress: Progress,
    ) -> list[StoreRestore]:
        config = self.config.stores
        chosen = list(stores) if stores else sorted(set(config) & set(checkpoint.stores))
        for store in chosen:
            self.config.store(store)
            with _usable(into):
                exists = (into / store).exists()
            if exists:
                raise InvalidError(
                    f"{into / store} exists", hint="choose a directory that does not contain the store yet"
                )
        factories_of = {name: tuple(factories or config[name].restore_factories) for name in chosen}
        plans = plan_retained(record, checkpoint, factories_of, job=self.config.job_name)
        with _usable(into):
            into.mkdir(parents=True, exist_ok=True)
        with temporary_directory(".restoring-", into) as work:
            return [self._restore_one(record.task, plan, work, into, progress) for plan in plans]

    def _restore_one(self, task: str, plan: StorePlan, work: Path, into: Path, progress: Progress) -> StoreRestore:
        directories = StoreDirectories(work / plan.store, self._services.clock, self._services.ids)
        services = replace(self._services, directories=lambda _task, _store: directories)
        committed, restored = restore_store(services, task, plan, progress)
        if committed is not None:
            with disk_errors(into):
                committed.path.rename(into / plan.store)
        return restored

    @contextmanager
    def open_store(
        self,
        task: str,
        store: str,
        checkpoint_id: str | None = None,
        progress: Progress = no_progress,
        *,
        whole: bool = False,
    ) -> Iterator[ReadableStore]:
        """A store as of one checkpoint, restored into a temporary directory that is deleted after the block.

        A store with a TTL has the entries that had not expired at the time of the checkpoint.

        Args:
            whole: fetch everything first, because most of it will be read, or because the store stays open for long.
                Otherwise only those parts of a large store in a blob store are fetched that something reads, when it
                does. A read raises MissingBlob if the job no longer retains the checkpoint and has deleted such a part.

        Raises: ConfigError for an unknown name; as :meth:`restore`. So do reads of a store that is not here as a whole.
        """
        with temporary_directory() as into:
            record = self.records().get(task)
            checkpoint = self._find(record, task, checkpoint_id)
            assert record is not None
            config = self.config.store(store)
            opened = None if whole else self._open_by_need(record, checkpoint, store, into / ".parts", progress)
            if opened is None:
                self._restore(record, checkpoint, into, [store], None, progress)
                opened = open_snapshot(config.type, into / store, config.rocksdb)
            try:
                yield as_published(opened, checkpoint, self._services.identity(task, store))
            finally:
                opened.close()

    def _open_by_need(
        self, record: CheckpointRecord, checkpoint: Checkpoint, store: str, staging: Path, progress: Progress
    ) -> LocalStore | None:
        """From the first restore factory, if it can; None if the whole state is restored."""
        factories = {store: tuple(self.config.stores[store].restore_factories)}
        plans = plan_retained(record, checkpoint, factories, job=self.config.job_name)
        if not plans or not plans[0].candidates:
            return None
        factory, marker = plans[0].candidates[0]
        request = RestoreRequest(self._services.identity(record.task, store), marker, staging, (), progress)
        try:
            state = self._services.restore_manager(factory).open_by_need(request, _WORTH)
        except (MissingError, CorruptError, RetryableError) as error:
            log.warning("%s/%s: parts of it cannot be read by need: %s", record.task, store, error)
            return None
        return state.store if state is not None else None

    def scan(
        self,
        record: CheckpointRecord,
        checkpoint: Checkpoint,
        store: str,
        start: bytes | None = None,
        end: bytes | None = None,
        size: int = 10_000,
    ) -> Generator[list[tuple[bytes, bytes]]]:
        """The items of a store with ``start`` ≤ key < ``end``, in key order, in lists of up to ``size``. Lists of large
        items are shorter: they have about 16 MiB. A store with a TTL has those items that had not expired at the time
        of the checkpoint.

        The store is restored into a temporary directory, which is deleted when the generator ends or is closed. Needs
        Kafka only to restore from a changelog. Then it also reads the checkpoint topic, if ``record`` may be old.

        Args:
            record: of the store's task, from :meth:`retaining`.
            checkpoint: one of the record's. If it does not have the store, there are no items.

        Raises: ConfigError for an unknown name; as :meth:`restore`.
        """
        config = self.config.store(store)
        if store not in checkpoint.stores or (start is not None and end is not None and start >= end):
            return
        record, [checkpoint] = self._renewed(record, [checkpoint], store)
        with temporary_directory() as into:
            self._restore(record, checkpoint, into, [store], None, no_progress)
            for batch in snapshot_batches(config.type, into / store, config.rocksdb, start, end, size):
                yield live_items(batch, checkpoint, self._services.identity(record.task, store))

    def pairs(self, before: str, after: str | None = None, tasks: Sequence[str] = ()) -> list[Pair]:
        """The two checkpoints of each task that retains both. Without an ID, ``after`` is the task's current one.

        Raises: MissingState if there is none, or if one of ``tasks`` does not retain both.
        """
        records = self.retaining(before, tasks)
        if after is None:
            return [Pair(record, self._find(record, record.task, before), record.current) for record in records]
        return find_pairs(records, before, after, all_of_them=bool(tasks))

    def changes(self, pair: Pair, store: str) -> Generator[KeyChange]:
        """The keys of a store that differ between two checkpoints, in key order. Needs Kafka as :meth:`scan` does.

        Raises: ConfigError for an unknown name; MissingState, MissingBlob, CorruptError if a checkpoint cannot be
            restored; UnavailableError, AccessDenied, DiskFull.
        """
        record, [before, after] = self._renewed(pair.record, [pair.before, pair.after], store)
        return compare(self._services, Pair(record, before, after), store, no_progress)

    def _renewed(
        self, record: CheckpointRecord, wanted: Sequence[Checkpoint], store: str
    ) -> tuple[CheckpointRecord, list[Checkpoint]]:
        """The record and its checkpoints, with those that the topic has now, if a changelog may supply one of these and
        the record may be old. An old record lacks newer checkpoints, so it does not show that compaction may have
        removed keys, and even deletes. The restore then decides by the times of the newer ones.

        Raises: MissingState if the task is not the same any more.
        """
        published_ms = record.current.published_ms
        if (
            KAFKA_CHANGELOG not in self.config.store(store).restore_factories
            or not any(one.marker(KAFKA_CHANGELOG, store) for one in wanted)
            or (published_ms is not None and self._services.clock.time_ns() // 1_000_000 - published_ms < _RECENT_MS)
        ):
            return record, list(wanted)
        now = self._log.read(only_settled=True).get(record.task)
        if now is None or now.layout != record.layout:
            raise MissingState(
                "the job was rescaled, or has lost its checkpoints, since the checkpoints were looked up",
                hint="begin again",
                task=record.task,
            )
        known = {one.checkpoint_id: one for one in (*record.checkpoints, *now.checkpoints)}
        newest_first = sorted(known.values(), key=lambda one: one.sequence, reverse=True)
        return replace(now, checkpoints=tuple(newest_first)), [known[one.checkpoint_id] for one in wanted]

    def close(self) -> None:
        self._log.close()
        self._services.close()

    def __enter__(self) -> JobReader:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


@contextmanager
def _usable(into: Path) -> Generator[None]:
    """The use of a directory that the caller has chosen.

    Raises: InvalidError if none can be there; DiskFull, AccessDenied, RetryableError.
    """
    hint = "choose another directory"
    try:
        str(into).encode()
    except UnicodeEncodeError:
        raise InvalidError("the name of the directory is not UTF-8", hint=hint, path=ascii(str(into))) from None
    with translated("the directory cannot be used", into, kinds=MISTYPED, hints=dict.fromkeys(MISTYPED, hint)):
        yield
