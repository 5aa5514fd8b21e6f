"""Verify: prove that the backends of a task's stores hold the same state at one checkpoint. Publishes nothing.

Steps for each store, of which the parts run in processes of their own:

1. hash each backend: a changelog by reading it up to its marker (:mod:`statemgr.backends.changelog.digest`), any other
   backend by restoring it into a temporary directory and hashing ranges of its keys
2. compare the counts and the hashes (:mod:`statemgr.model.content`)
3. where they differ, bring both backends into local stores and list the first keys that differ

Memory is bounded by the parts that are hashed at a time, and the disk by the stores that are verified at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TypeVar

from statemgr.backends.changelog.digest import hash_rows, read_rows
from statemgr.backends.changelog.restore import ChangelogRestore
from statemgr.config.factories import KAFKA_CHANGELOG, RAW_TOPIC
from statemgr.errors import StatemgrError
from statemgr.flows.opening.restore import restore_store
from statemgr.ids import task_index
from statemgr.local import bulk_writer, key_ranges, open_snapshot, remove
from statemgr.local.directories import StoreDirectories
from statemgr.model.checkpoint import ChangelogMarker, Checkpoint, CheckpointRecord
from statemgr.model.content import WAYS, Content, differing, of_pairs
from statemgr.model.plan import StorePlan, plan_retained
from statemgr.operations.migrate.plain_read import read_plainly
from statemgr.os_errors import disk_errors
from statemgr.ports import Progress, TopicInfo
from statemgr.services import Services, Submit

T = TypeVar("T")
#: Offsets of a changelog that one process reads at a time.
_RANGE = 4_000_000
#: Smaller changelogs and stores are not worth several processes.
_WORTH_SPLITTING = 200_000


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that two backends have differently: bytes of its value in each, None where the key is missing."""

    key: bytes
    sizes: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class StoreVerified:
    """One store of one task: backend → its content.

    ``problem``: why nothing could be compared; ``failed``: because a backend could not supply the state.
    ``seconds``: backend → how long it took to hash. ``differences``: the first keys that differ.
    """

    task: str
    store: str
    checkpoint_id: str
    contents: Mapping[str, Content] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    problem: StatemgrError | None = None
    failed: bool = False

    @property
    def equal(self) -> bool:
        """Whether at least two backends were compared and have the same content."""
        return self.problem is None and len(self.contents) > 1 and len(set(self.contents.values())) == 1


@dataclass(frozen=True)
class StoreToVerify:
    """A store at a retained checkpoint of a record, and the backends to compare."""

    record: CheckpointRecord
    checkpoint: Checkpoint
    store: str
    factories: tuple[str, ...]

    @property
    def name(self) -> str:
        """The task and the store, for people."""
        return f"{self.record.task} / {self.store}"

    def plan(self, factory: str, job: str) -> StorePlan:
        """How one backend restores it. Raises: MissingState if it has no marker."""
        (plan,) = plan_retained(self.record, self.checkpoint, {self.store: (factory,)}, job=job)
        return plan


class Verifier:
    """Verifies stores. Safe to use from many threads.

    Args:
        submit: gives work to other processes.
        processes: how many processes there are.
        differences: how many keys that differ are listed for each store.
    """

    def __init__(
        self, services: Services, submit: Submit, progress: Progress, *, processes: int, differences: int
    ) -> None:
        self._services = services
        self._submit = submit
        self._progress = progress
        self._processes = processes
        self._differences = differences

    def verify(self, wanted: StoreToVerify) -> StoreVerified:
        """Raises: UnavailableError, DiskFull, AccessDenied; MissingState, CorruptError of a backend."""
        scratch = self._services.scratch_file("verify")
        seconds: dict[str, float] = {}

        def hashed(factory: str) -> Content:
            started = self._services.clock.monotonic()
            found = self._hash(wanted, factory, scratch / factory.replace("/", "_"))
            seconds[factory] = self._services.clock.monotonic() - started
            return found

        with disk_errors(scratch):
            scratch.mkdir(parents=True)
            try:
                with self._services.executors.pool("verify", len(wanted.factories)) as pool:  # 1
                    running = {factory: pool.submit(hashed, factory) for factory in wanted.factories}
                contents = {factory: one.result() for factory, one in running.items()}
                differences: tuple[Difference, ...] = ()
                if len(set(contents.values())) > 1:  # 2
                    differences = self._differing(wanted, scratch / "differing")  # 3
            finally:
                remove(scratch)
        task, checkpoint_id = wanted.record.task, str(wanted.checkpoint.checkpoint_id)
        return StoreVerified(task, wanted.store, checkpoint_id, contents, seconds, differences)

    def _hash(self, wanted: StoreToVerify, factory: str, directory: Path) -> Content:
        directory.mkdir()
        what = f"{wanted.name}: {factory}"
        if factory == RAW_TOPIC:
            return self._hash_changelog(what, directory, *self._raw(wanted), plain=True)
        plan = wanted.plan(factory, self._services.config.job_name)
        if factory == KAFKA_CHANGELOG:
            changelog = ChangelogRestore(self._services)

            def read(marker: ChangelogMarker, info: TopicInfo, start: int) -> Content:
                place = marker.topic, marker.partition, start, marker.offset
                return changelog.in_time(
                    marker, info, lambda: self._hash_changelog(what, directory, *place, plain=False)
                )

            return changelog.exactly(wanted.record.task, plan.candidates[0][1], plan.successors.get(factory), read)
        restored = self._restore(wanted, plan, directory)
        config = self._services.config.stores[wanted.store]
        ranges = key_ranges(config.type, restored, self._processes)
        return self._sum(
            f"hash {what}",
            [self._submit(hash_range, config.type, dict(config.rocksdb), restored, *bounds) for bounds in ranges],
        )

    def _hash_changelog(
        self, what: str, directory: Path, topic: str, partition: int, start: int, end: int, *, plain: bool
    ) -> Content:
        """Read ranges of offsets in parallel, then add up the parts of the keys in parallel."""
        count = max(self._processes, -(-(end - start) // _RANGE)) if end - start > _WORTH_SPLITTING else 1
        bounds = [start + (end - start) * number // count for number in range(count + 1)]
        ranges = [directory / str(number) for number in range(count)]
        reading = [
            self._submit(read_range, topic, partition, *pair, into, plain)
            for pair, into in zip(pairwise(bounds), ranges, strict=True)
        ]
        for done, one in enumerate(reading):
            one.result()
            self._progress(f"read {what}", bounds[done + 1] - start, end - start)
        parts = [[into / str(part) for into in ranges] for part in range(WAYS)]
        dealt = [parts[number :: self._processes] for number in range(min(self._processes, WAYS))]
        return self._sum(f"hash {what}", [self._submit(hash_parts, some) for some in dealt])

    def _sum(self, what: str, parts: Sequence[Future[Content]]) -> Content:
        total = Content()
        for done, part in enumerate(parts):
            total += part.result()
            self._progress(what, done + 1, len(parts))
        return total

    def _raw(self, wanted: StoreToVerify) -> tuple[str, int, int, int]:
        """The store's changelog, up to the checkpoint's marker. Without a marker: up to its end."""
        topic, partition = self._services.config.stores[wanted.store].changelog_topic, task_index(wanted.record.task)
        start, end = self._services.changelog().bounds(topic, partition)
        marker = wanted.checkpoint.marker(KAFKA_CHANGELOG, wanted.store)
        if isinstance(marker, ChangelogMarker) and (marker.topic, marker.partition) == (topic, partition):
            end = min(end, marker.offset)
        return topic, partition, start, end

    def _restore(self, wanted: StoreToVerify, plan: StorePlan, directory: Path) -> Path:
        services = self._services
        directories = StoreDirectories(directory / "restored", services.clock, services.ids)
        alone = replace(services, directories=lambda _task, _store: directories)
        committed, _ = restore_store(alone, wanted.record.task, plan, self._progress)
        assert committed is not None
        return committed.path

    # --- differences ----------------------------------------------------------------------------------

    def _differing(self, wanted: StoreToVerify, directory: Path) -> tuple[Difference, ...]:
        config = self._services.config.stores[wanted.store]
        with ExitStack() as closing:
            scans = []
            for number, factory in enumerate(wanted.factories):
                local = self._local(wanted, factory, directory / str(number))
                opened = open_snapshot(config.type, local, config.rocksdb)
                closing.callback(opened.close)
                scans.append(opened.scan(None, None))
            found = tuple(islice(self._sizes(wanted.factories, scans), self._differences))
            del scans
        return found

    @staticmethod
    def _sizes(factories: Sequence[str], scans: Sequence[Iterator[tuple[bytes, bytes]]]) -> Iterator[Difference]:
        for key, values in differing(scans):
            sizes = [None if value is None else len(value) for value in values]
            yield Difference(key, dict(zip(factories, sizes, strict=True)))

    def _local(self, wanted: StoreToVerify, factory: str, directory: Path) -> Path:
        directory.mkdir(parents=True)
        if factory != RAW_TOPIC:
            return self._restore(wanted, wanted.plan(factory, self._services.config.job_name), directory)
        config = self._services.config.stores[wanted.store]
        with bulk_writer(config.type, directory, config.rocksdb) as writer:
            for batch in read_plainly(self._services.config, self._services.clock, *self._raw(wanted)):
                writer.write(batch)
        return directory


# --- work of other processes ------------------------------------------------------------------------------


def read_range(
    services: Services, topic: str, partition: int, start: int, end: int, directory: Path, plain: bool
) -> int:
    """Step 1 of a changelog, for a range of offsets. Returns: the number of records."""
    if plain:
        return read_rows(read_plainly(services.config, services.clock, topic, partition, start, end), directory)
    batches = services.changelog().changes(topic, partition, start, end)
    return read_rows((batch.changes for batch in batches), directory)


def hash_parts(_: Services, parts: Sequence[Sequence[Path]]) -> Content:
    """Step 2 of a changelog, for some parts of the keys: the files of each, oldest first."""
    return sum(map(hash_rows, parts), Content())


def hash_range(
    _: Services, kind: str, options: Mapping[str, object], directory: Path, first: bytes | None, end: bytes | None
) -> Content:
    """The content of a range of keys of a restored store."""
    opened = open_snapshot(kind, directory, options)
    try:
        return of_pairs(opened.scan(first, end))
    finally:
        opened.close()
