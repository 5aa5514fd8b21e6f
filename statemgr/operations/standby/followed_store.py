"""A copy of one store of a job, for reading, at the newest checkpoint. ``standby.py`` brings it up to date."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statemgr.config import JobConfig
from statemgr.errors import CorruptFile, MissingFile, MissingState, StatemgrError
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local import open_snapshot
from statemgr.model.checkpoint import Checkpoint
from statemgr.operations.standby.standby import Follower
from statemgr.ports import LocalStore, no_progress
from statemgr.services import Services
from statemgr.stores.expiry import as_published
from statemgr.wiring import open_services

log = logging.getLogger(__name__)
#: Directory below ``state.dir`` for copies. No job has a name that begins with a dot.
_COPIES = ".copies"
#: Turns until the directories of a turn are still there and whole when they are opened or read: another process may
#: have removed them, and a file may be damaged.
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
        #: Why the last refresh failed, if it did, when it ended, and how long it took.
        self._failed: tuple[StatemgrError, float, float] | None = None
        #: The layout of the copies.
        self._generation: int | None = None
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
        seconds. If it has just failed, this raises the same error for as long as that took, because a failure may take
        minutes: another one for each task of a loop would make the loop miss ``max.poll.interval.ms``.

        Raises: MissingState (no checkpoint yet), MissingBlob, CorruptError, UnavailableError, AccessDenied, DiskFull.
            The copy then stays as it is for the tasks that failed, and for all of them if the job was rescaled: keys
            have moved between tasks.
        """
        with self._lock:
            now_s = self._services.clock.monotonic()
            if self._refreshed_s is not None and now_s - self._refreshed_s < older_than_s:
                return
            if self._failed is not None and now_s - self._failed[1] < min(older_than_s, self._failed[2]):
                raise self._failed[0].with_traceback(None)
            try:
                checked = set[str]()
                vanished = self._turn(checked)
                for _ in range(_TURNS):
                    if vanished is None:
                        break
                    vanished = self._turn(checked)
                if vanished is not None:
                    raise vanished
            except StatemgrError as error:
                ended_s = self._services.clock.monotonic()
                self._failed = error, ended_s, ended_s - now_s
                raise
            self._refreshed_s, self._failed = now_s, None

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys, in their order; None for an absent key. A key belongs to one task, and is looked up in
        one task after the other until it is found. The first call refreshes, and one that finds a damaged file fetches
        it again. Raises: as :meth:`refresh`."""
        with self._lock:
            for _ in range(_TURNS):
                if self._refreshed_s is None:
                    self.refresh()
                with suppress(CorruptFile, MissingFile):  # each turn fetches the copy of one task
                    return self._look_up(keys)
            self.refresh()
            return self._look_up(keys)

    def _look_up(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = [None] * len(keys)
        missing: Sequence[int] = range(len(keys))
        for task, copy in self._copies.items():
            if copy.local is None or not missing:
                continue
            identity = self._services.identity(task, self._store)
            there = as_published(copy.local, copy.checkpoint, identity)
            try:
                values = there.get_many([keys[at] for at in missing])
            except (CorruptFile, MissingFile) as error:
                self._distrust(task, error)
                self._discard(task, self._copies.pop(task))
                self._follower.forget(task)
                self._refreshed_s = None  # until a refresh has succeeded, no call may miss the values of this task
                raise
            for at, value in zip(missing, values, strict=True):
                found[at] = value
            missing = [at for at in missing if found[at] is None]
        return found

    def _distrust(self, task: str, error: CorruptFile | MissingFile) -> None:
        """From now on, every process on this machine checks the task's files before it uses them."""
        log.warning("%s: the local copy of %s is damaged, and is fetched again: %s", task, self._store, error)
        with suppress(StatemgrError):  # if all files are gone there is nothing to check
            self._services.directories(task, self._store).distrust()

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

    def _turn(self, checked: set[str]) -> MissingState | CorruptFile | None:
        """Follow every task. Copies of another layout replace all others at once, when all of them are open.

        Args:
            checked: the tasks whose files were damaged in an earlier turn, and have been checked since; updated.

        Returns: an error if a directory was removed meanwhile or is damaged, or the job was rescaled: the next turn
        fetches again.
        Raises: as :meth:`refresh`.
        """
        vanished: MissingState | CorruptFile | None = None
        turn = self._follower.turn()
        if not self._copies:
            self._generation = self._follower.generation
        errors: list[StatemgrError] = [
            self._follower.unknown(str(followed.task)) for followed in turn if followed.waits
        ]
        errors += [followed.error for followed in turn if followed.error is not None]
        unopened = {followed.task for followed in turn if followed.task is not None and followed.error is None}
        of_new_layout: dict[str, _Copy] = {}
        try:
            for followed in turn:
                task, checkpoint = followed.task, followed.checkpoint
                if followed.error is not None or task is None or checkpoint is None:
                    continue
                try:
                    if followed.generation == self._generation:
                        self._replace(task, self._opened(task, checkpoint, self._copies.get(task)))
                        unopened.discard(task)
                    else:
                        of_new_layout[task] = self._opened(task, checkpoint, None)
                        if followed.generation != self._follower.generation:
                            raise MissingState("the job was rescaled in the meantime", job=self._config.job_name)
                except CorruptFile as error:
                    if task in checked:
                        errors.append(error)
                        continue
                    checked.add(task)
                    self._distrust(task, error)
                    vanished = error
                except MissingState as error:
                    vanished = error
                except StatemgrError as error:
                    errors.append(error)
            if of_new_layout:
                unopened = set(self._follower.there)  # the next turn has all of them again
                if vanished is None and of_new_layout.keys() == unopened:
                    of_new_layout, self._copies = self._copies, of_new_layout
                    self._generation = self._follower.generation
                    unopened.clear()
            elif self._generation == self._follower.generation:
                for name in self._copies.keys() - self._follower.there:  # the topic was created again
                    self._discard(name, self._copies.pop(name))
        finally:
            for task, copy in of_new_layout.items():
                self._discard(task, copy)
            for name in unopened:
                self._follower.forget(name)
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

    def _opened(self, task: str, checkpoint: Checkpoint, before: _Copy | None) -> _Copy:
        """``before``: the copy that this one replaces, if they may share what is open."""
        state_id = checkpoint.stores.get(self._store)
        if before is not None and before.state_id == state_id:
            return _Copy(checkpoint, state_id, before.live, before.local)
        if state_id is None:
            return _Copy(checkpoint, None)
        directories = self._services.directories(task, self._store)
        committed = directories.find(state_id)
        if committed is None:
            raise MissingState("another process has removed the local copy", task=task, store=self._store)
        live = directories.clone(committed)
        config = self._config.stores[self._store]
        try:
            return _Copy(checkpoint, state_id, live, open_snapshot(config.type, live, config.rocksdb))
        except BaseException:
            directories.discard(live)
            raise

    def _replace(self, task: str, copy: _Copy) -> None:
        before = self._copies.get(task)
        self._copies[task] = copy
        if before is not None and before.local is not copy.local:
            self._discard(task, before)

    def _discard(self, task: str, copy: _Copy) -> None:
        if copy.local is not None and copy.live is not None:
            copy.local.close()
            self._services.directories(task, self._store).discard(copy.live)
