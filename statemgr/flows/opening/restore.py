"""Restore: bring every store of a task to exactly one published checkpoint.

Steps (the manager or the driver has already fenced other owners and read the topic):

1. plan which factory supplies each store, or raise a typed error
2. for all stores in parallel: take the local directory of this state, if it exists and verifies
3. otherwise let the first factory that can fetch or replay into a staging directory, and verify it
4. swap the directory in by rename
5. clone it into a private live directory, and open the store

Nothing local changes before the plan is complete. If the state is missing, corrupt or unreachable in one factory, the
next factory of the restore list is tried, and the reason is kept. A try that fails, or whose process dies, leaves the
files that it has fetched, unless local files are damaged, or another factory needs the space. The next try verifies
them, uses the correct ones, and removes the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from statemgr.errors import (
    ANOTHER_COPY,
    CorruptBlob,
    CorruptError,
    CorruptFile,
    MissingBlob,
    MissingError,
    MissingFile,
    MissingState,
    OpeningCancelled,
    RetryableError,
    StatemgrError,
    UnavailableError,
)
from statemgr.flows.committing.commit import Refill
from statemgr.flows.opening.by_need import fetch_rest, open_by_need
from statemgr.flows.opening.shared_state import SharedStates
from statemgr.logs import Event, counted, size, tell
from statemgr.model.checkpoint import Checkpoint, Marker
from statemgr.model.jobs.permissions import NO_PERMISSIONS, Permissions
from statemgr.model.plan import StorePlan, plan_stores
from statemgr.phases import Phase, announce
from statemgr.ports import (
    CommittedDirectory,
    Moment,
    Progress,
    Restored,
    RestorePlace,
    RestoreRequest,
    StoreIdentity,
    no_progress,
)
from statemgr.services import Services
from statemgr.stores.open_store import OpenedByNeed, OpenStore

log = logging.getLogger(__name__)
_STORES_AT_ONCE = 8
#: From this many fetched bytes, the disk is assumed to be busy when the store is opened.
_MUCH = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoreRestore:
    """How one store was restored. ``factory``: a factory's name, ``local`` (the directory was here) or ``empty``.

    ``seconds``: wall time. ``reasons``: factory → why it was not used. ``damaged``: factories whose backup is
    incomplete or corrupt. ``unreachable``: factories that could not be reached. ``bytes_to_come``: what is fetched
    while the store is in use.
    """

    store: str
    factory: str
    bytes_fetched: int = 0
    bytes_reused: int = 0
    records: int = 0
    seconds: float = 0.0
    reasons: Mapping[str, str] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()
    bytes_to_come: int = 0

    def story(self) -> str:
        """How it was restored and why so, for a line in the log."""
        if self.factory == "empty":
            return "starts empty, because no checkpoint has this store"
        cost = (
            f"restored from {self.factory} in {self.seconds:.3f} s ({size(self.bytes_fetched)} fetched, "
            f"{size(self.bytes_reused)} reused, {counted(self.records, 'record')})"
        )
        if self.bytes_to_come:
            cost += f", {size(self.bytes_to_come)} to come"
        return f"{cost}; {self.why()}"

    def why(self) -> str:
        """Why it came from there and not from elsewhere."""
        others = "; ".join(
            why if factory == self.factory else f"{factory} was not used: {why}"
            for factory, why in self.reasons.items()
        )
        if self.factory == "local":
            return "the local directory has exactly the published state"
        return others or "the first of task.restore.factories"

    def fields(self) -> dict[str, Any]:
        """The fields of such a line."""
        return {
            "store": self.store,
            "backend": self.factory,
            "why": self.why() if self.factory != "empty" else "new",
            "bytes": self.bytes_fetched,
            "bytes_reused": self.bytes_reused,
            "bytes_to_come": self.bytes_to_come,
            "records": self.records,
            "seconds": round(self.seconds, 3),
        }

    @property
    def reason(self) -> str:
        """Why it came from there, in one word: ``new`` (no state was published), ``local-copy``, ``first-choice``, or
        what an earlier factory of the list was: ``damaged``, ``unreachable`` or ``absent`` (it has no such state)."""
        if self.factory in ("empty", "local"):
            return "new" if self.factory == "empty" else "local-copy"
        if self.damaged or self.unreachable:
            return "damaged" if self.damaged else "unreachable"
        return "absent" if self.reasons else "first-choice"


#: Called with a store and the share of the current step of its restore that is done.
Watch = Callable[[str, float], None]


def _unwatched(store: str, ratio: float) -> None:
    """Nobody watches."""


def restore_task(
    services: Services,
    task: str,
    checkpoint: Checkpoint | None,
    *,
    permissions: Permissions = NO_PERMISSIONS,
    older: Sequence[Checkpoint] = (),
    newer: Sequence[Checkpoint] = (),
    as_of: Moment | None = None,
    only: Collection[str] | None = None,
    progress: Progress = no_progress,
    watch: Watch = _unwatched,
    by_need: bool | SharedStates = False,
    refill: Refill = frozenset(),
) -> tuple[dict[str, OpenStore], list[StoreRestore]]:
    """Restore and open all stores of a task (or ``only`` some) in parallel. ``progress`` and ``watch`` may be called on
    other threads.

    Args:
        older: the other retained checkpoints, newest first; a local directory of one of them may help.
        newer: the retained checkpoints after this one, oldest first, if it is not the current one.
        as_of: a moment before the topic was read, at which no newer checkpoint was published yet, if one is known.
        by_need: large stores may be opened before all of them is here (:mod:`statemgr.flows.opening.by_need`): by an
            owner that keeps them open, or from states that it shares with others.
        refill: the backups that the next commit fills in any case. Stores with such a backup are restored as a whole.

    Raises: PermissionNeeded, MissingState, CorruptError, UnavailableError, DiskFull; then no store stays open.
    """
    announce(Phase.PLAN, task, services.config.job_key)
    if checkpoint is not None and checkpoint.names_blobs:
        services.expect_blobs()
    config = services.config
    plans = plan_stores(
        checkpoint,
        {name: store.restore_factories for name, store in config.stores.items()},
        durable=services.durable,
        permissions=permissions,
        older=older,
        newer=newer,
        job=config.job_name,
        task=task,
    )
    wanted = [plan for plan in plans if only is None or plan.store in only]
    filled = {
        name
        for name, store in config.stores.items()
        for factory in store.backup_factories
        if checkpoint is None or checkpoint.marker(factory, name) is None or (factory, name) in refill
    }
    restores = [
        _Restore(services, task, plan, progress, as_of, watch, by_need=by_need if plan.store not in filled else False)
        for plan in wanted
    ]
    if len(restores) == 1:  # a thread of its own would cost a micro-batch some milliseconds
        only_store, restored = restores[0].restore_and_open()
        return {restores[0].plan.store: only_store}, [restored]
    with services.executors.pool("restore", _STORES_AT_ONCE) as pool:
        running = {one.plan.store: pool.submit(one.restore_and_open) for one in restores}
    failed = [future for future in running.values() if future.exception() is not None]
    if failed:
        with ExitStack() as closing:
            closing.callback(failed[0].result)  # runs last, so no error of a close hides this one
            for future in running.values():
                if future not in failed:
                    closing.callback(future.result()[0].close)
    opened = {store: future.result() for store, future in running.items()}
    return {store: found for store, (found, _) in opened.items()}, [restored for _, restored in opened.values()]


def restore_store(
    services: Services, task: str, plan: StorePlan, progress: Progress, as_of: Moment | None = None
) -> tuple[CommittedDirectory | None, StoreRestore]:
    """Restore one store: from the local directory of exactly this state, else from the first factory that can.

    ``as_of``: as in :func:`restore_task`. Raises: as :func:`restore_task`.
    """
    return _Restore(services, task, plan, progress, as_of).restore()


def open_restored(
    services: Services,
    identity: StoreIdentity,
    committed: CommittedDirectory | OpenedByNeed | None,
    state_id: str | None,
    *,
    read_first: bool = False,
    as_of: Moment | None = None,
) -> OpenStore:
    """Step 5: open a store whose state is in ``committed``. The arguments are those of :class:`OpenStore`."""
    config = services.config.stores[identity.store]
    needing = [m for m in map(services.backup_manager, config.backup_factories) if m.needs_changes]
    return OpenStore(
        services,
        identity,
        config,
        committed,
        state_id,
        track_changes=bool(needing),
        # the directory that fills a backend already contains the earlier changes
        track_first=any(manager.fills_from_changes for manager in needing),
        read_first=read_first,
        as_of=as_of,
    )


class _Restore:
    """The restore of one store, on one thread."""

    def __init__(
        self,
        services: Services,
        task: str,
        plan: StorePlan,
        progress: Progress,
        as_of: Moment | None,
        watch: Watch = _unwatched,
        *,
        by_need: bool | SharedStates = False,
    ) -> None:
        self.plan = plan
        self._by_need = by_need
        self._watch = watch
        self._services = services
        self._identity = services.identity(task, plan.store)
        self._directories = services.directories(task, plan.store)
        self._progress = progress
        self._as_of = as_of
        #: The place of a try that has not begun, and the leftovers of the newest one.
        self._place: RestorePlace | None = None
        self._leftovers: Sequence[Path] = ()

    def restore_and_open(self) -> tuple[OpenStore, StoreRestore]:
        """If a local directory cannot be opened after all, restore again without it."""
        distrusted = False
        self._watch(self.plan.store, 0.0)
        found = self._opened_by_need() if self._by_need else None
        while found is None:
            committed, restored = self.restore()
            self._identity.announce(Phase.OPEN)
            try:
                found = self._open(committed, restored), restored
            except (CorruptError, MissingError) as error:
                log.warning("%s: the local directory cannot be opened: %s", self._identity, error)
                if not distrusted:
                    distrusted = True
                    self._directories.distrust()
                    continue
                # the files are the committed ones, but cannot be opened as a store: another factory may have a better
                # copy
                if self.plan.state_id is None:
                    raise
                self._directories.remove(self.plan.state_id)
                if restored.factory != "local":
                    self._skip(restored.factory, error)
                if not self.plan.candidates:
                    raise
        opened, restored = found
        tell(
            log, Event.RESTORED, "%s: %s", self._identity, restored.story(),
            job=self._identity.job_name, task=self._identity.task, **restored.fields(),
        )  # fmt: skip
        self._watch(self.plan.store, 1.0)
        return opened, restored

    def _opened_by_need(self) -> tuple[OpenStore, StoreRestore] | None:
        """Steps 2 to 5 at once, if nothing of the state is on this machine."""
        started = self._services.clock.elapsed()
        shared = self._by_need if isinstance(self._by_need, SharedStates) else None
        if self.plan.empty or not self.plan.candidates:
            return None
        factory, marker = self.plan.candidates[0]
        request = self._request(factory, marker)
        if request.reusable:
            if shared is not None:
                shared.forget(self._identity)
            return None
        try:
            if shared is None:
                state = open_by_need(self._services, factory, request)
            else:
                state = shared.branch(factory, request, self.plan.state_id)
        except OpeningCancelled:
            raise
        except (MissingError, CorruptError, RetryableError) as error:
            log.warning("%s: it is restored as a whole: %s", self._identity, error)
            return None
        if state is None:
            if shared is None:  # otherwise it may have left files just now
                self._place = RestorePlace(request.staging, request.reusable, request.leftovers)  # nothing is there yet
            return None
        try:
            if shared is None:  # otherwise another process may fetch the rest
                state.state.check_space()
            opened = open_restored(self._services, self._identity, state, self.plan.state_id, as_of=self._as_of)
        except BaseException:
            state.state.store.close()
            if shared is None:
                self._directories.abandon(state.directory)
            else:
                shared.release(self._identity, state.state)
                self._directories.discard(state.directory)
            raise
        if shared is not None:
            opened.stop_fetching = partial(shared.release, self._identity, state.state)
        else:
            try:
                self._discard_leftovers()
                opened.stop_fetching = fetch_rest(
                    self._services, self._identity, factory, state, state.state.fetch_rest, opened.give_up
                )
            except BaseException:
                opened.close()
                raise
        return opened, StoreRestore(
            self.plan.store, factory, bytes_fetched=state.fetched,
            seconds=self._services.clock.elapsed() - started, reasons=self.plan.skipped,
            bytes_to_come=state.state.missing,
        )  # fmt: skip

    def restore(self) -> tuple[CommittedDirectory | None, StoreRestore]:
        """Steps 2 to 4. Returns: the directory (None for a store that starts empty), and how it was restored."""
        plan, clock = self.plan, self._services.clock
        started = clock.elapsed()
        if plan.empty:
            return None, StoreRestore(plan.store, "empty")
        assert plan.state_id is not None
        here = self._directories.find(plan.state_id)
        if here is not None:
            reused = sum(size for size, _ in here.files.values())
            seconds = clock.elapsed() - started
            return here, StoreRestore(plan.store, "local", bytes_reused=reused, seconds=seconds, reasons=plan.skipped)
        reasons = dict(plan.skipped)
        damaged, unreachable = list[str](), list[str]()
        failure: StatemgrError | None = None
        for factory, marker in plan.candidates:
            try:
                committed, restored = self._from_factory(factory, marker)
            except OpeningCancelled:
                raise
            except (MissingError, CorruptError, RetryableError) as error:
                reasons[factory] = str(error)
                failure = error.with_where(task=self._identity.task, store=plan.store)
                tell(
                    log, Event.RETRYING, "%s: %s could not restore it: %s", self._identity, factory, error,
                    level=logging.WARNING, job=self._identity.job_name, task=self._identity.task, store=plan.store,
                    backend=factory,
                )  # fmt: skip
                if isinstance(error, RetryableError):
                    unreachable.append(factory)
                elif not isinstance(error, CorruptFile | MissingFile):
                    damaged.append(factory)
                continue
            if restored.damage is not None:
                reasons[factory] = restored.damage
                damaged.append(factory)
            self._discard_leftovers()
            return committed, StoreRestore(
                plan.store, factory, restored.bytes_fetched, restored.bytes_reused, restored.records,
                clock.elapsed() - started, reasons, tuple(damaged), tuple(unreachable),
            )  # fmt: skip
        assert failure is not None
        raise failure if len(reasons) == 1 else self._none_could(reasons, can_pass=bool(unreachable))

    def _from_factory(self, factory: str, marker: Marker) -> tuple[CommittedDirectory, Restored]:
        """Try one factory; once more without local files if those turn out to be damaged."""
        try:
            return self._fetched(factory, marker)
        except (CorruptFile, MissingFile) as error:
            log.warning("%s: local files are damaged or gone: %s", self._identity, error)
            self._directories.distrust()
            return self._fetched(factory, marker)

    def _fetched(self, factory: str, marker: Marker) -> tuple[CommittedDirectory, Restored]:
        """Steps 3 and 4. A failure leaves the fetched files to the next try. If the checkpoint was deleted while it was
        fetched, the next checkpoint has most of its files, too."""
        plan, directories = self.plan, self._directories
        assert plan.state_id is not None
        request = self._request(factory, marker)
        staging = request.staging
        try:
            restored = self._services.restore_manager(factory).restore(request)
            self._identity.announce(Phase.SWAP)
            adopted = directories.adopt(staging, plan.state_id, restored.files, self._as_of, restored.tables)
            return adopted, restored
        except BaseException as error:
            is_damage = isinstance(error, CorruptError | MissingError)
            if is_damage and not (isinstance(error, CorruptBlob | MissingBlob) and self._is_last(factory)):
                directories.discard(staging)
            else:
                directories.abandon(staging)
            raise

    def _is_last(self, factory: str) -> bool:
        return factory == self.plan.candidates[-1][0]

    def _discard_leftovers(self) -> None:
        """Remove what earlier tries left: what is right in it was taken over."""
        for leftover in self._leftovers:
            self._directories.discard(leftover)

    def _request(self, factory: str, marker: Marker) -> RestoreRequest:
        plan = self.plan
        place, self._place = self._place or self._directories.begin_restore(), None
        staging, reusable, self._leftovers = place
        return RestoreRequest(
            self._identity, marker, staging, reusable, self._report, plan.older.get(factory, {}), self._leftovers,
            plan.successors.get(factory), plan.retained.get(factory, ()),
        )  # fmt: skip

    def _report(self, what: str, done: int, total: int) -> None:
        self._watch(self.plan.store, min(done / total, 1.0) if total else 0.0)
        self._progress(what, done, total)

    def _skip(self, factory: str, why: StatemgrError) -> None:
        others = tuple(candidate for candidate in self.plan.candidates if candidate[0] != factory)
        self.plan = replace(self.plan, candidates=others, skipped={**self.plan.skipped, factory: str(why)})

    def _open(self, committed: CommittedDirectory | None, restored: StoreRestore) -> OpenStore:
        read_first = restored.bytes_fetched >= _MUCH
        state_id = self.plan.state_id if committed is not None else None
        return open_restored(
            self._services, self._identity, committed, state_id, read_first=read_first, as_of=self._as_of
        )

    def _none_could(self, reasons: Mapping[str, str], *, can_pass: bool) -> StatemgrError:
        """One error with the reasons of several factories, retryable if one of them may pass."""
        kind, then = (
            (UnavailableError, "call again when it answers") if can_pass else (MissingState, "fix one of these reasons")
        )
        return kind(
            "no restore factory could supply the store: " + "; ".join(f"{f}: {why}" for f, why in reasons.items()),
            hint=f"{then} (nothing was changed on this machine), or {ANOTHER_COPY}",
            **self._identity.where,
        )
