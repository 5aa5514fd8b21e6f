"""Makes the new stores of a rescale durable in every backend: a first snapshot, and a filled changelog. Nothing here
changes what is current.

What is stored later is only what has changed since: the new files, and the changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statemgr.backends.changelog.integrity import ends_with
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import MissingBlob
from statemgr.flows.committing.limits import SHORTEST_GRACE_MS
from statemgr.ids import attempt_millis, task_name
from statemgr.local import scan_in_batches
from statemgr.local.change_buffer import FrozenChanges
from statemgr.local.directories import StoreDirectories
from statemgr.model.checkpoint import ChangelogMarker, Layout, Marker
from statemgr.model.codecs import decode_prepared, encode_prepared
from statemgr.model.commit import Change, PreparedChanges, PreparedCommit, PreparedStore, StoreSession
from statemgr.operations.rescale.changelog import fill_changelog
from statemgr.operations.rescale.tail import extend_changelog
from statemgr.operations.rescale.work import Spread, directory_size
from statemgr.ports import StoreSnapshot, TopicInfo
from statemgr.services import Services, Submit

#: The end of the name of a file that RocksDB never changes, and whose name it never uses again.
_TABLE = ".sst"


@dataclass(frozen=True)
class StoredStore:
    """A new store that is durable in all its backends.

    Attributes:
        commit: a commit of this store alone.
        tables: the tables of its directory, with their bytes and XXH3-128.
        carried: blobs that the commit needs and that earlier commits of the store have added.
    """

    commit: PreparedCommit
    tables: Mapping[str, tuple[int, bytes]]
    carried: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """A note of a store that carries nothing."""
        tables = {name: (size, digest.hex()) for name, (size, digest) in self.tables.items()}
        return {"commit": encode_prepared(self.commit).hex(), "tables": tables}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> StoredStore:
        """Raises: ValueError, KeyError, TypeError, CorruptRecord (a commit of another version)."""
        tables = {name: (size, bytes.fromhex(digest)) for name, (size, digest) in found["tables"].items()}
        return cls(decode_prepared(bytes.fromhex(found["commit"])), tables)


@dataclass(frozen=True)
class Tail:
    """The changes of a store since it was stored: files of changes, of all new tasks."""

    spread: Spread
    files: Sequence[str]
    since: StoredStore


class NewStores:
    """Stores of the new layout. Safe to use from many threads.

    Args:
        services: those of the new layout.
        submit: gives work to other processes.
    """

    def __init__(self, services: Services, submit: Submit) -> None:
        self._services, self._submit = services, submit

    def store(
        self, store: str, task: int, path: Path, changelog: TopicInfo | None, tail: Tail | None = None
    ) -> StoredStore:
        """Make the finished directory ``path`` durable. ``tail``: the store is durable except for these changes.

        Raises: RetryableError, AccessDenied, DiskFull, FencedError, OutcomeUnknownError; then it can be repeated.
        """
        services, config = self._services, self._services.config
        attempt, name = services.ids.attempt_id(), task_name(task)
        factories = config.stores[store].backup_factories
        filling = None
        before = tail.since.commit.stores[store].markers if tail else {}
        if KAFKA_CHANGELOG in factories:
            assert changelog is not None
            marker = before.get(KAFKA_CHANGELOG)
            if tail is not None and isinstance(marker, ChangelogMarker):
                filling = self._submit(extend_changelog, tail.spread, changelog, task, tail.files, marker, path)
            else:
                filling = self._submit(fill_changelog, store, changelog, task, path)
        made = StoreDirectories(path.with_name(f"{path.name}-unused"), services.clock, services.ids).finished(path)
        if tail is not None:
            known = tail.since.tables
            made.files.update((file, known[file]) for file in known if known[file][0] == made.files.get(file, (-1,))[0])
        snapshot = StoreSnapshot(
            identity=services.identity(name, store),
            state_id=f"{attempt}-{store}",
            attempt=attempt,
            made=made,
            changes=FrozenChanges(StoreSession(), 0, 0, ()),
            whole=_Whole(services, store, path),
            materialize=True,
        )
        markers: dict[str, Marker] = {}
        changes: dict[str, PreparedChanges] = {}
        added: list[str] = []
        for factory in factories:
            if factory == KAFKA_CHANGELOG:
                continue
            manager = services.backup_manager(factory)
            base = before.get(factory)
            if base is not None and manager.branches:
                # a lineage of its own: nothing that follows is taken for what followed the base
                base = manager.branch(snapshot.identity, base, together=True).marker
            else:
                base = None
            backup = manager.prepare(snapshot, base, portable=True)
            added += backup.added_blobs
            if backup.marker is not None:
                markers[factory] = backup.marker
            if backup.changes is not None:
                changes[factory] = backup.changes
        if filling is not None:
            markers[KAFKA_CHANGELOG] = filling.result()
        commit = PreparedCommit(
            config.job_name,
            config.job_id,
            name,
            Layout(0, config.tasks, ""),
            0,
            tail.since.commit.attempt if tail else attempt,  # its age is that of the oldest blob that it needs
            None,
            None,
            {store: PreparedStore(snapshot.state_id, markers, changes)},
            added_blobs=tuple(added),
        )
        carried = tail.since.carried.union(tail.since.commit.added_blobs) if tail else frozenset[str]()
        tables = {
            file: (size, digest) for file, (size, digest) in made.files.items() if digest and file.endswith(_TABLE)
        }
        return StoredStore(commit, tables, carried)

    def is_usable(self, stored: StoredStore, changelog: TopicInfo | None) -> bool:
        """Whether all backends have what an earlier run stored: it went to those of the present configuration, all
        uploads exist, and are so young that they cannot be deleted as garbage before the publish, and the changelog
        ends with the store. Raises: RetryableError, AccessDenied."""
        services, commit = self._services, stored.commit
        for store, made in commit.stores.items():
            if made.markers.keys() | made.changes.keys() != set(services.config.stores[store].backup_factories):
                return False
        began_ms = attempt_millis(commit.attempt) or 0
        age_ms = services.clock.time_ns() // 1_000_000 - began_ms
        if not 0 <= age_ms < SHORTEST_GRACE_MS // 4:
            return False
        if not self.is_at_end(stored, changelog):
            return False
        for error in services.transfer().absent(commit.added_blobs).values() if commit.added_blobs else ():
            if not isinstance(error, MissingBlob):
                raise error
            return False
        return True

    def is_at_end(self, stored: StoredStore, changelog: TopicInfo | None) -> bool:
        """Whether the store's new changelog, if it has one, ends with it. Raises: RetryableError, AccessDenied."""
        markers = [store.markers.get(KAFKA_CHANGELOG) for store in stored.commit.stores.values()]
        ours = [marker for marker in markers if isinstance(marker, ChangelogMarker)]
        return all(changelog is not None and self._ends_at(marker, changelog) for marker in ours)

    def _ends_at(self, marker: ChangelogMarker, changelog: TopicInfo) -> bool:
        """Whether the changelog is the marker's, and nothing was sent after it."""
        if marker.topic_id != changelog.topic_id:
            return False
        log = self._services.changelog()
        _, end = log.bounds(marker.topic, marker.partition)
        return ends_with(log, marker, end)


class _Whole:
    """The whole content of a finished store as a change set, read during iteration."""

    def __init__(self, services: Services, store: str, directory: Path) -> None:
        self._config, self._directory = services.config.stores[store], directory

    @property
    def count(self) -> int:
        return sum(1 for _ in self)

    @property
    def size(self) -> int:
        """Bytes on disk: an estimate of the bytes of keys and values."""
        return directory_size(self._directory)

    def __iter__(self) -> Iterator[Change]:
        for batch in scan_in_batches(self._directory, self._config.rocksdb, None, None, 1000):
            yield from batch
