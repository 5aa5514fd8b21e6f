"""A task opens a large store before all of it is here. The rest comes while the task works.

1. only if no commit needs a directory of the store all the time, the next one has no backend to fill from it
   (:mod:`statemgr.flows.opening.restore`), and the snapshot has ``task.restore.by.need.bytes`` or more: open it with
   what an opening needs (:meth:`statemgr.ports.RestoreManager.open_by_need`)
2. reads fetch what they need; commits store changes, which need no file
3. a background thread fetches the rest and verifies each file; after an error other than damage it tries again for ever
4. then the store is one as any other: it compacts, and has snapshots and local copies

Until step 4, its directory is a staging directory of this process. It is never hashed, linked, uploaded or offered. If
the task is closed or the process dies, the next opening takes the files over, and verifies each part that it keeps.

If a part is missing or damaged in the blob store, the store is lost (:meth:`OpenStore.give_up`). The task is opened
again, and that opening restores the whole state, from an older snapshot if need be.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from statemgr.blobs.counting import counts_of
from statemgr.errors import CorruptFile, MissingFile, StatemgrError
from statemgr.flows.worker import Worker
from statemgr.logs import size
from statemgr.ports import RestoreRequest, StoreIdentity
from statemgr.services import Services
from statemgr.stores.open_store import OpenedByNeed

log = logging.getLogger(__name__)
_PAUSE_S = 5.0
#: Seconds between two lines in the log about what is still to come.
_TELL_S = 30.0
#: Seconds that a store that is closed waits until nothing writes to its files.
_END_S = 1.0


def open_by_need(services: Services, factory: str, request: RestoreRequest) -> OpenedByNeed | None:
    """Step 1. Returns: None if the whole state has to be restored. Raises: as ``RestoreManager.restore``."""
    identity, at_least = request.identity, services.config.by_need_bytes
    config = services.config.stores[identity.store]
    if not at_least or any(services.backup_manager(one).needs_directory for one in config.backup_factories):
        return None
    directories = services.directories(identity.task, identity.store)
    try:
        state = services.restore_manager(factory).open_by_need(request, at_least, owned=True)
    except BaseException:
        directories.abandon(request.staging)
        raise
    return OpenedByNeed(request.staging, state, state.fetched) if state is not None else None


def fetch_rest(
    services: Services,
    identity: StoreIdentity,
    factory: str,
    opened: OpenedByNeed,
    fetch_all: Callable[[Callable[[], None]], None],
    lost: Callable[[CorruptFile | MissingFile], object],
) -> Callable[[], Future[None]]:
    """Steps 3 and 4, on a thread. Counts what arrives, also by need, as bytes of a restore from ``factory``.

    Args:
        fetch_all: does the work, as ``PartialState.fetch_rest``.
        lost: called when a part is missing or damaged in the blob store, which ends the work.

    Returns: what ends the work early. It waits a moment, and returns what is done when nothing writes to the files any
    more.
    """
    worker: Worker[None] = Worker(services, f"fetch-{identity.task}-{identity.store}", str(identity), background=True)
    began, ended = services.clock.elapsed(), Future[None]()
    state, counting, counted = opened.state, threading.Lock(), opened.fetched

    def count() -> None:
        nonlocal counted
        with counting:
            before, counted = counted, state.fetched
            counts_of(identity.job_key).add("restored", factory, by=counted - before)

    def fetch() -> None:
        try:
            fetch_or_try_again()
        finally:
            count()
            ended.set_result(None)

    due, faults = began + _TELL_S, state.faults

    def look() -> None:
        nonlocal due, faults
        worker.go_on()
        count()
        if services.clock.elapsed() >= due:
            seconds = f", all of it in about {state.missing / state.rate:.0f} s" if state.rate else ""
            log.info(
                "%s: %s to come, %s per second, %.1f reads per second wait for a part%s",
                identity, size(state.missing), size(int(state.rate)), (state.faults - faults) / _TELL_S, seconds,
            )  # fmt: skip
            due, faults = services.clock.elapsed() + _TELL_S, state.faults

    def fetch_or_try_again() -> None:
        told = ""
        while not worker.closing:
            try:
                fetch_all(look)
            except (CorruptFile, MissingFile) as error:
                if worker.pause(0.0):  # otherwise it was closed, and its files are being removed
                    lost(error)
                return
            except Exception as error:  # whatever it is: the store needs the rest
                if str(error) != told and not worker.closing:
                    told = str(error)
                    log.warning(
                        "%s: the rest of it cannot be fetched now: %s", identity, error,
                        exc_info=not isinstance(error, StatemgrError | OSError),
                    )  # fmt: skip
                worker.pause(_PAUSE_S)
            else:
                if not state.missing:  # otherwise another process has fetched it, or the state is closed
                    seconds = services.clock.elapsed() - began
                    log.info("%s: all of it is here (%s fetched) after %.1f s", identity, size(state.fetched), seconds)
                return

    def stop() -> Future[None]:
        worker.close(wait=False)
        wait([ended], _END_S)
        return ended

    worker.start(fetch)
    return stop
