"""Persist ahead: much that was written since the last commit is stored before the next one begins.

Steps, for one store at a time, while its task goes on:

1. freeze the changes so far
2. store them as segments, as a commit would that is then not published
3. the next commit takes these segments as they are, and stores only what came later

Nothing here changes what is current; what fails is left to the commit. Blobs that no commit takes up expire.
Source: the pre-emptive persist of Flink's changelog state backend (FLIP-158).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from statemgr.errors import RetryableError, StatemgrError
from statemgr.flows.commit import CommitBase
from statemgr.flows.open_store import OpenStore
from statemgr.flows.parts import Parts
from statemgr.local.change_buffer import FrozenChanges
from statemgr.ports import StoreSnapshot

log = logging.getLogger(__name__)
#: Bytes of changes since the last commit, or since the last ones that were stored ahead of it.
AHEAD_BYTES = 8 * 1024 * 1024


class PersistAhead:
    """The segments that are stored ahead of one task's commits. Started on the task's thread; the work has its own.

    Args:
        portable: the commits are published by another process.
    """

    def __init__(self, parts: Parts, task: str, *, portable: bool) -> None:
        self._parts = parts
        self._task = task
        self._portable = portable
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._held = False

    def start(self, store: OpenStore, base: CommitBase) -> None:
        """Steps 1 and 2, unless they are under way or held. No commit may be on its way."""
        if self._held or (self._running is not None and not self._running.done()):
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"statemgr-ahead-{self._task}")
        self._running = self._pool.submit(self._tried, store, store.freeze_changes(), base)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While a commit is frozen: nothing is started."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def wait(self) -> None:
        """Before a commit is prepared: for what is under way. Raises: RetryableError when that takes too long."""
        if self._running is not None:
            try:
                self._running.result(self._parts.config.commit_timeout_ms / 1000)
            except TimeoutError:
                raise RetryableError(
                    "segments that are stored ahead of the commit are still on their way",
                    hint="look whether the blob store is reachable; the changes are in the next commit",
                    task=self._task,
                ) from None

    def close(self) -> None:
        """Wait for what is under way."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _tried(self, store: OpenStore, changes: FrozenChanges, base: CommitBase) -> None:
        try:
            persist(self._parts, store, changes, base, portable=self._portable)
        except Exception as error:
            log.warning(
                "task %s: nothing of %s is stored ahead: %s",
                self._task, store.identity.store, error, exc_info=not isinstance(error, StatemgrError),
            )  # fmt: skip


def is_useful(parts: Parts, store: OpenStore) -> bool:
    """Whether a backend of the store has segments."""
    return any(parts.segment_backends(store.config))


def persist(parts: Parts, store: OpenStore, changes: FrozenChanges, base: CommitBase, *, portable: bool) -> None:
    """Store changes in every backend of segments that has the store already. Raises: as its ``prepare``."""
    identity, attempt = store.identity, parts.ids.attempt_id()
    for factory, manager in parts.segment_backends(store.config):
        marker = base.marker(factory, identity.store)
        if marker is not None:
            state_id = f"{attempt}-{identity.store}"
            snapshot = StoreSnapshot(identity, state_id, attempt, None, changes, None)
            manager.prepare(snapshot, marker, portable=portable)
