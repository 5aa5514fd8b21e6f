"""Large states that the attempts of a process share while parts of them are missing.

An attempt is open for a moment only. So the process keeps a state that was opened by need
(:mod:`statemgr.flows.opening.by_need`), and each attempt works on a branch of it.

1. the first attempt at a task opens the state by need, from files that a dead process has left, if there are some
2. for a later attempt, the state follows the published checkpoint; if it cannot, it is opened again
3. each attempt gets a branch: a store with the content of now, in a directory of its own. The table files are the same
   files with the same holes, so what one attempt reads is here for the next one
4. between attempts and during them, one process of the machine fetches the rest
5. then the state becomes a local copy, from which attempts on this machine begin as usual. The other processes close
   theirs as soon as no attempt works on it

If a part is lost, the state is closed and removed as soon as no attempt works on it. So is a state whose task nobody on
this machine has had for ``state.cleanup.delay.ms``. The thread of step 4 looks, since the sweep
(:mod:`statemgr.flows.sweep`) leaves alone what a living process has open.

Until step 5, all directories are staging directories of this process. If it dies, the next process that opens the task
by need takes the files over, and verifies each part that it keeps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

from statemgr.errors import RetryableError, StatemgrError, UnavailableError
from statemgr.flows.opening.by_need import fetch_rest, open_by_need
from statemgr.local import durable
from statemgr.local.shared_directories import exclusive_if_free
from statemgr.model.checkpoint import Marker
from statemgr.ports import PartialState, RestoreRequest, StoreIdentity
from statemgr.services import Services
from statemgr.stores.open_store import OpenedByNeed, put_away

log = logging.getLogger(__name__)
#: A lock file in the directory of a store: the process that holds it fetches the rest.
_LOCK = "rest.lock"


class _Unused(Exception):
    """Ends the fetching of a state whose task has moved away."""


class SharedStates:
    """The shared states of one process, one for each store. Safe to use from many threads."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._lock = threading.Lock()
        self._states: dict[StoreIdentity, _SharedState] = {}

    def branch(self, factory: str, request: RestoreRequest, state_id: str | None) -> OpenedByNeed | None:
        """Steps 1 to 3. Returns: None if the whole state has to be restored. Raises: as ``RestoreManager.restore``."""
        with self._lock:
            found = self._states.get(request.identity)
            if found is None:
                found = self._states[request.identity] = _SharedState(self._services, request.identity)
        return found.branch(factory, request, state_id)

    def release(self, identity: StoreIdentity, branch: PartialState) -> None:
        """A branch is about to be closed."""
        with self._lock:
            found = self._states.get(identity)  # none if a local copy has come meanwhile
        if found is not None:
            found.release(branch)

    def forget(self, identity: StoreIdentity) -> None:
        """This machine has a local copy: stop sharing a state that is not whole."""
        with self._lock:
            found = self._states.pop(identity, None)
        if found is not None:
            found.close()


class _SharedState:
    """The shared state of one store."""

    def __init__(self, services: Services, identity: StoreIdentity) -> None:
        self._services = services
        self._identity = identity
        self._directories = services.directories(identity.task, identity.store)
        self._lock = threading.RLock()
        self._opened: OpenedByNeed | None = None
        #: None while it is the state of no checkpoint.
        self._state_id: str | None = None
        self._branches: list[PartialState] = []
        self._stop: Callable[[], Future[None] | None] = lambda: None
        self._fetches = False
        #: Whether nobody needs the state any more: another process has made a local copy, or a part of it is lost, or
        #: the task has moved away.
        self._over = False
        #: When a process of this machine has opened the task, in nanoseconds since the epoch (None: not known), and
        #: when that was seen, on the clock of durations.
        self._touched: tuple[int | None, float] = None, services.clock.elapsed()

    def branch(self, factory: str, request: RestoreRequest, state_id: str | None) -> OpenedByNeed | None:
        with self._lock:
            try:
                return self._branch(factory, request, state_id)
            except UnavailableError:
                raise
            except BaseException:
                self.close()
                raise

    def _branch(self, factory: str, request: RestoreRequest, state_id: str | None) -> OpenedByNeed | None:
        self._touched = None, self._services.clock.elapsed()
        if self._opened is None or (fetched := self._followed(request.marker)) is None:
            if self._branches:
                return None  # an attempt at another checkpoint is open
            self.close()
            request = replace(request, leftovers=self._directories.leftovers())  # its own files are among them now
            self._opened, self._over = open_by_need(self._services, factory, request), False
            if self._opened is None:
                return None
            for leftover in request.leftovers:
                self._directories.discard(leftover)  # what is right in it was taken over
            fetched = self._opened.fetched
            lost = partial(self._lost, self._opened)
            self._stop = fetch_rest(self._services, self._identity, factory, self._opened, self._fetch_all, lost)
        self._state_id = state_id
        directory = self._directories.staging()
        try:
            branch = self._opened.state.branch(directory)
        except BaseException:
            self._directories.discard(directory)
            raise
        self._branches.append(branch)
        return OpenedByNeed(directory, branch, fetched)

    def _followed(self, marker: Marker) -> int | None:
        """Step 2. Returns: None if the state has to be opened again."""
        assert self._opened is not None
        if self._over or self._opened.state.is_damaged:
            return None
        if not self._fetches and not self._branches and self._directories.leftovers():
            return None  # the process that fetched the rest has died: take its files over
        state_id, self._state_id = self._state_id, None  # it is no state, unless all of the changes are applied
        fetched = self._opened.state.follow(marker)
        if fetched is None:
            self._state_id = state_id
        return fetched

    def release(self, branch: PartialState) -> None:
        with self._lock:
            with suppress(ValueError):
                self._branches.remove(branch)
            self._close_over()

    def _end(self, state: OpenedByNeed) -> None:
        """Nobody needs a state any more, unless it was opened again meanwhile."""
        with self._lock:
            self._over = self._over or self._opened is state
            self._close_over()

    def _close_over(self) -> None:
        """Close the state if nobody needs it any more, and no attempt works on it. The caller holds the lock."""
        opened = self._opened
        if opened is None or not self._over or self._branches:
            return
        self._opened = None
        opened.state.store.close()
        self._directories.discard(opened.directory)

    def close(self) -> None:
        """Stop fetching, and leave the files to the next opening."""
        with self._lock:
            opened, self._opened = self._opened, None
            stop, self._stop = self._stop, lambda: None
        ended = stop()
        if opened is None:
            return
        opened.state.store.close()
        is_left = opened.state.missing and not opened.state.is_damaged
        put_away(self._directories, opened.directory, ended if is_left else None)

    def _lost(self, opened: OpenedByNeed, error: Exception) -> None:
        log.warning("%s: the next attempt restores the whole state: %s", self._identity, error)
        self._end(opened)

    def _fetch_all(self, check: Callable[[], None]) -> None:
        """Steps 4 and 5, on a thread of their own."""
        opened = self._opened
        if opened is None:
            return

        def check_use() -> None:
            check()
            if not self._is_used():
                raise _Unused

        try:
            check_use()
            self._fetch(opened, check_use)
        except _Unused:
            with self._lock:
                if self._is_used():
                    raise RetryableError("its task has come back") from None
                self._end(opened)
            log.info("%s: what was fetched is removed, because no process of this machine uses it", self._identity)

    def _is_used(self) -> bool:
        """Whether an attempt works on the state, or somebody on this machine has had the task not long ago."""
        touched, now_s = None, self._services.clock.elapsed()
        before, since_s = self._touched
        with suppress(OSError, StatemgrError):
            touched = durable.changed_ns(self._services.task_directory(self._identity.task))
        if self._branches or touched != before:
            self._touched, since_s = (touched, now_s), now_s
        return now_s - since_s < self._services.config.state_cleanup_delay_ms / 1000

    def _fetch(self, opened: OpenedByNeed, check: Callable[[], None]) -> None:
        lock = self._services.task_directory(self._identity.task) / self._identity.store / _LOCK
        with exclusive_if_free(lock) as is_free:
            if not is_free:
                raise RetryableError("another process of this machine fetches it")
            if self._directories.reusable():
                log.info("%s: another process of this machine has fetched all of it", self._identity)
                self._end(opened)
                return
            if self._directories.leftovers():
                raise RetryableError("the process that fetched it has died, and the next attempt takes its files over")
            self._fetches = True
            try:
                if opened.state.missing:
                    opened.state.check_space()
                opened.state.fetch_rest(check)
                self._leave_copy(opened)
            finally:
                self._fetches = False

    def _leave_copy(self, opened: OpenedByNeed) -> None:
        """Step 5. The branches have links to the files."""
        staging = self._directories.staging()
        try:
            with self._lock:
                if self._opened is not opened:
                    return
                if self._state_id is None:
                    raise RetryableError("it has followed a part of the way to a checkpoint")
                opened.state.store.concurrent_checkpoint(staging)
                state_id = self._state_id
            self._directories.adopt(staging, state_id, None, tables=opened.state.files)
        finally:
            self._directories.discard(staging)
        with self._lock:
            if self._opened is not opened:
                return
            self._opened = None
        opened.state.store.close()
        self._directories.discard(opened.directory)
