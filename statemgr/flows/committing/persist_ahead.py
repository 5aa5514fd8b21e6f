"""Persist ahead: stores large amounts of changes before the next commit begins.

Steps, for one store at a time, while its task continues:

1. freeze the changes so far
2. store them as segments, like a commit, without publishing
3. the next commit takes these segments as they are, and stores only later changes

Nothing here changes which state is current. If it fails, the commit stores the changes. Blobs that no commit uses
expire. Source: the pre-emptive persist of Flink's changelog state backend (FLIP-158).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from statemgr.errors import RetryableError
from statemgr.flows.committing.commit import CommitBase
from statemgr.flows.worker import Worker
from statemgr.local.change_buffer import FrozenChanges
from statemgr.ports import StoreSnapshot
from statemgr.services import Services
from statemgr.stores.open_store import OpenStore

#: Bytes of changes that trigger it, since the last commit or since those that were stored ahead.
AHEAD_BYTES = 8 * 1024 * 1024


class PersistAhead:
    """Stores segments ahead of one task's commits. The task's thread starts the work, which runs on another one.

    Args:
        portable: another process publishes the commits.
    """

    def __init__(self, services: Services, task: str, *, portable: bool) -> None:
        self._services = services
        self._task = task
        self._portable = portable
        self._worker: Worker[None] = Worker(services, f"ahead-{task}", f"task {task}")
        self._held = False

    def watch(self, store: OpenStore, base: Callable[[], CommitBase | None]) -> None:
        """Start whenever a store has many changes, if one of its backends has segments.

        ``base``: returns the base of the next commit, or None if nothing may be stored now.
        """
        if any(self._services.segment_backends(store.config)):
            store.content.watch(AHEAD_BYTES, lambda: self._start(store, base))

    def _start(self, store: OpenStore, base: Callable[[], CommitBase | None]) -> None:
        """Steps 1 and 2, unless they are in progress or held back."""
        if self._held or self._worker.busy or (continued := base()) is None:
            return
        work = partial(persist, self._services, store, store.freeze_changes(), continued, portable=self._portable)
        self._worker.attempt(f"storing changes of {store.identity.store} ahead of the commit", work)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Start nothing inside the block, while a commit is frozen."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def wait(self) -> None:
        """Before a commit is prepared: wait for work in progress. Raises: RetryableError if that takes too long."""
        if not self._worker.wait(self._services.config.commit_timeout_ms / 1000):
            raise RetryableError(
                "changes could not be stored before the commit within task.commit.timeout.ms",
                hint="check that the blob store is reachable; the next commit has the changes",
                task=self._task,
            )

    def close(self) -> None:
        """Wait for work in progress."""
        self._worker.close()


def persist(services: Services, store: OpenStore, changes: FrozenChanges, base: CommitBase, *, portable: bool) -> None:
    """Store changes in every segment backend that already has the store. Raises: as its ``prepare``."""
    identity, attempt = store.identity, services.ids.attempt_id()
    for factory, manager in services.segment_backends(store.config):
        marker = base.marker(factory, identity.store)
        if marker is not None:
            state_id = f"{attempt}-{identity.store}"
            snapshot = StoreSnapshot(identity, state_id, attempt, None, changes, None)
            manager.prepare(snapshot, marker, portable=portable)
