"""A copy of one store of a job, for reading, at the newest checkpoint. ``standby.py`` brings it up to date."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statemgr.config import JobConfig
from statemgr.errors import MissingState, StatemgrError
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local import open_snapshot
from statemgr.model.checkpoint import Checkpoint
from statemgr.operations.standby.standby import Followed, Follower
from statemgr.ports import LocalStore, no_progress
from statemgr.services import Services
from statemgr.stores.expiry import as_published
from statemgr.wiring import open_services

#: Directory below ``state.dir`` for copies. No job has a name that begins with a dot.
_COPIES = ".copies"
#: Turns until the directories of a turn are still there when they are opened: another process may have removed them.
_TURNS = 5


@dataclass(frozen=True)
class _Copy:
    """An open copy of a task's store. ``local``: None if the checkpoint does not have the store."""

    checkpoint: Checkpoint
    state_id: str | None
    live: Path | None = None
    local: LocalStore | None = None


class FollowedStore:
    """Reads a store of a job that may be running: fences nobody, and writes nothing to Kafka or to blobs.

    A checkpoint counts as published when no transaction before it is open on the checkpoint topic, which may be some
    milliseconds after its commit has returned.

    Keeps the store of every task below ``<state.dir>/.copies``, which all processes of a machine share, and fetches
    only what a newer checkpoint adds. Safe to use from many threads.

    Args:
        tasks: ``Partition <i>``; if none is named, all tasks of the job.
        services: makes the adapters, the clock, the source of IDs and the threads.

    Raises: ConfigError if the job has no such store.
    """

    def __init__(
        self,
        config: JobConfig,
        store: str,
        tasks: Collection[str] = (),
        services: Callable[[JobConfig], Services] = open_services,
    ) -> None:
        config.store(store)
        config = JobConfig.from_mapping({**config.to_mapping(), "state.dir": str(config.state_dir / _COPIES)})
        self._config = config
        self._store = store
        self._lock = threading.RLock()
        self._refreshed_s: float | None = None
        self._copies: dict[str, _Copy] = {}
        with ExitStack() as undo:
            self._services = services(config)
            undo.callback(self._services.close)
            self._log = CheckpointTopic(config, self._services.clock)
            undo.callback(self._log.close)
            self._closing = undo.pop_all()
        self._follower = Follower(self._services, self._log, tasks, no_progress, stores=(store,), only_settled=True)

    @property
    def checkpoints(self) -> Mapping[str, Checkpoint]:
        """Task → the checkpoint that the copy has."""
        with self._lock:
            return {task: copy.checkpoint for task, copy in self._copies.items()}

    def refresh(self, older_than_s: float = 0.0) -> None:
        """Bring the copy to the newest checkpoint of every task, unless that was done in the last ``older_than_s``
        seconds.

        Raises: MissingState (no checkpoint yet), MissingBlob, CorruptError, UnavailableError, AccessDenied, DiskFull.
            The copy then stays as it is for the tasks that failed.
        """
        with self._lock:
            now_s = self._services.clock.monotonic()
            if self._refreshed_s is not None and now_s - self._refreshed_s < older_than_s:
                return
            vanished = self._turn()
            for _ in range(_TURNS):
                if vanished is None:
                    break
                vanished = self._turn()
            if vanished is not None:
                raise vanished
            self._refreshed_s = now_s

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys, in their order; None for an absent key. A key belongs to one task, and is looked up in
        one task after the other until it is found. The first call refreshes. Raises: as :meth:`refresh`."""
        with self._lock:
            if self._refreshed_s is None:
                self.refresh()
            found: list[bytes | None] = [None] * len(keys)
            missing: Sequence[int] = range(len(keys))
            for task, copy in self._copies.items():
                if copy.local is None or not missing:
                    continue
                identity = self._services.identity(task, self._store)
                there = as_published(copy.local, copy.checkpoint, identity)
                for at, value in zip(missing, there.get_many([keys[at] for at in missing]), strict=True):
                    found[at] = value
                missing = [at for at in missing if found[at] is None]
            return found

    def close(self) -> None:
        """Close the copies and every connection. What was fetched stays for the next process. Idempotent."""
        with self._lock:
            for task in list(self._copies):
                self._discard(task, self._copies.pop(task))
            self._closing.close()

    def __enter__(self) -> FollowedStore:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _turn(self) -> MissingState | None:
        """Follow every task. Returns: an error if a directory was removed meanwhile, which the next turn fetches again.

        Raises: as :meth:`refresh`.
        """
        vanished: MissingState | None = None
        turn = self._follower.turn()
        errors: list[StatemgrError] = [
            self._follower.unknown(str(followed.task)) for followed in turn if followed.waits
        ]
        errors += [followed.error for followed in turn if followed.error is not None]
        unopened = {followed.task for followed in turn if followed.task is not None}
        try:
            for followed in turn:
                try:
                    self._open(followed)
                except MissingState as error:
                    vanished = error
                except StatemgrError as error:
                    errors.append(error)
                else:
                    unopened.discard(followed.task or "")
        finally:
            for task in unopened:
                self._follower.forget(task)
        for task in self._copies.keys() - self._follower.there:
            self._discard(task, self._copies.pop(task))  # a rescale has retired it
        if errors:
            raise errors[0]
        if not self._follower.there:
            raise MissingState(
                "the job has no checkpoint",
                hint="check job.name, job.id and task.checkpoint.topic, or wait for its first commit",
                job=self._config.job_name,
                topic=self._config.checkpoint_topic,
            )
        return vanished

    def _open(self, followed: Followed) -> None:
        task, checkpoint = followed.task, followed.checkpoint
        if followed.error is not None or task is None or checkpoint is None:
            return
        state_id = checkpoint.stores.get(self._store)
        before = self._copies.get(task)
        if before is not None and before.state_id == state_id:
            self._copies[task] = _Copy(checkpoint, state_id, before.live, before.local)
            return
        copy = _Copy(checkpoint, None)
        if state_id is not None:
            directories = self._services.directories(task, self._store)
            committed = directories.find(state_id)
            if committed is None:
                raise MissingState("another process has removed the local copy", task=task, store=self._store)
            live = directories.clone(committed)
            config = self._config.stores[self._store]
            try:
                copy = _Copy(checkpoint, state_id, live, open_snapshot(config.type, live, config.rocksdb))
            except BaseException:
                directories.discard(live)
                raise
        self._copies[task] = copy
        if before is not None:
            self._discard(task, before)

    def _discard(self, task: str, copy: _Copy) -> None:
        if copy.local is not None and copy.live is not None:
            copy.local.close()
            self._services.directories(task, self._store).discard(copy.live)
