"""A history: owners of a job come, commit, die, sleep too long and come back, and a model knows what is right.

The model is small. The input is a sequence of changes that the seed gives, and a checkpoint has read it up to an
offset. So the state of a checkpoint is what the changes before its offset make, and:

- whoever opens a task finds exactly that state, of a checkpoint that somebody has tried to publish
- it is not older than any that an owner was told is published before the opening began
- it is not one whose commit an owner was told has failed
- a commit gives a store a new state ID if, and only if, the store has changed
- every operation ends, with a result or a typed error
- when the world is at peace again, the task opens, every backend alone restores the same state, every retained
  checkpoint can be restored, and one collection of garbage leaves exactly the blobs that retained checkpoints need
"""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from statemgr import JobConfig, StateManager
from statemgr.engine import Epoch, PreparedCommit, open_attempt
from statemgr.engine.attempts import Attempt
from statemgr.engine.host import AttemptHost
from statemgr.engine.task import Task
from statemgr.errors import (
    CorruptError,
    FencedError,
    InvalidError,
    MissingError,
    MissingState,
    OutcomeUnknownError,
    PermissionNeeded,
    RetryableError,
    StatemgrError,
)
from statemgr.flows.committing import background_snapshots
from statemgr.flows.opening.restore import restore_task
from statemgr.ids import IdSource, task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local.clock import SystemClock
from statemgr.model import codecs
from statemgr.model.checkpoint import Checkpoint, CheckpointKey, Owner
from statemgr.operations.gc.gc import collect_garbage
from statemgr.operations.gc.needed_blobs import find_needed_blobs
from statemgr.phases import Phase, add_observer, remove_observer
from statemgr.ports import no_progress
from statemgr.services import Services
from statemgr.wiring import open_services
from tests.simulation.actors import SOURCE, TASK, TOPIC, Loop, go_back
from tests.simulation.scheduler import Executors, Process, Scheduler, Thread
from tests.simulation.servers import Broker, Faults, Network, SimulatedBlobStore, served

BACKENDS = ("blob-store", "kafka-changelog")
STORES = ("totals", "latest")
DAY_S = 86_400.0
#: Each new process looks for installed plugins, which takes as long as the rest of its start. Nothing is installed here
#: meanwhile.
_plugins = cache(importlib.metadata.entry_points)
#: Seconds after which an operation that has no end is a fault: no deadline of the configurations is longer.
PATIENCE_S = 3600.0
#: The key of another job's records on the checkpoint topic.
_NEIGHBOUR = codecs.encode_key(CheckpointKey("neighbour", "0", 0, TASK, 2, 1))
State = dict[str, dict[bytes, bytes]]


class Wrong(AssertionError):
    """The history broke a property."""


@dataclass
class Reached:
    """How far the work on a task is: its position in the input, and the stores with changes since the last commit."""

    position: int
    changed: set[str] = field(default_factory=set)


class Clock(SystemClock):
    """The clock of one machine, which may be wrong."""

    def __init__(self, scheduler: Scheduler, ahead_s: float) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._ahead_ns = int(ahead_s * 1e9)

    def time_ns(self) -> int:
        return int((self._scheduler.start_s + self._scheduler.now) * 1e9) + self._ahead_ns


class History:
    """One history.

    Args:
        seed: decides all of it.
        without: kinds of faults that do not happen, for a shorter story.

    Attributes:
        seen: what has happened how often.
    """

    def __init__(self, seed: int, *, without: frozenset[str] = frozenset(), owners: int | None = None) -> None:
        self.seed = seed
        self.scheduler = scheduler = Scheduler(seed)
        self.network = Network(scheduler, self._faults(without))
        self._directory = Path()
        self._name = f"simulated-{seed}"
        self.acked = 0
        #: position → how many commits of it are published, or may be
        self.tried = Counter({0: 1})
        self._acks = 0
        #: what executors have prepared for the last driver
        self._prepared: list[PreparedCommit] = []
        #: how often an owner is the driver of an engine
        self._drivers = (0.0, 0.4, 0.9)[scheduler.decide("drivers", 3)]
        #: the tasks of the job; only a driver works on those after the first
        self._tasks = 1 + (scheduler.decide("tasks", 3) == 0)
        self._width = (0, 7, 2900)[scheduler.decide("width of values", 3)]
        self._numbers = count()
        self._over = False
        #: where rollbacks go that have not ended, or whose outcome nobody knows
        self.going_back: list[int] = []
        #: process → the loop that runs in it
        self._loops: dict[str, Loop] = {}
        self._lifetimes = owners or 3 + scheduler.decide("lifetimes", 5)

    @property
    def seen(self) -> dict[str, int]:
        return self.network.seen

    def run(self) -> None:
        """Live it. Raises: Wrong, Stuck, or any error that an operation must not raise."""
        logging.disable(logging.CRITICAL)
        # a process begins with it as it is at first, whatever this one did before
        background_snapshots._PATIENCE = background_snapshots._Patience()
        shm = Path("/dev/shm")
        self._directory = Path(tempfile.mkdtemp(prefix="simulated-", dir=shm if shm.is_dir() else None))
        try:
            with mock.patch.object(importlib.metadata, "entry_points", _plugins):
                self.scheduler.run(self._live)
        finally:
            logging.disable(logging.NOTSET)
            shutil.rmtree(self._directory, ignore_errors=True)

    # --- the world -----------------------------------------------------------------------------------------------

    def _faults(self, without: frozenset[str]) -> Faults:
        faults = Faults()
        for kind, rates in {
            "lost_request": (0, 0.01, 0.05), "lost_answer": (0, 0.01, 0.05), "refused_record": (0, 0, 0.01),
            "kill": (0, 0.004, 0.01), "pause": (0, 0.002, 0.006), "blob_fails": (0, 0.02, 0.1), "slow": (0, 0.01, 0.03),
            "outage": (0, 0.0005, 0.002),
        }.items():  # fmt: skip
            rate = rates[self.scheduler.decide(f"rate of {kind}", 3)]
            setattr(faults, kind, 0.0 if kind in without else rate)
        return faults

    def _live(self) -> None:
        scheduler, network = self.scheduler, self.network
        self._topic = self._config("", 0).checkpoint_topic
        self.broker = broker = Broker(network)
        with served(broker, f"memory:{self._name}"):
            self.bucket: SimulatedBlobStore = SimulatedBlobStore(Clock(scheduler, 0), self._name)
            self.bucket.network = network
            broker.create(TOPIC, self._tasks)
            add_observer(self._observe)
            try:
                self._trouble()
                network.faults = Faults()
                scheduler.note("peace")
                self._peace()
            finally:
                remove_observer(self._observe)

    def _observe(self, phase: Phase, subject: str) -> None:
        self.network.step(phase.value)

    def _trouble(self) -> None:
        """Owners live and die, one after the other, and sometimes two at a time."""
        scheduler = self.scheduler
        living: list[tuple[Process, Thread]] = []
        for number in range(self._lifetimes):
            machine = f"machine-{scheduler.decide(f'machine of {number}', 2)}"
            if scheduler.chance(f"disk lost before {number}", 0.25):
                scheduler.note(f"{machine} loses its disk")
                for process, _ in living:
                    if process.machine == machine:
                        scheduler.kill(process)
                shutil.rmtree(self._directory / machine, ignore_errors=True)
            process = Process(f"owner-{number}", machine)
            config = self._config(machine, number)
            work = self._work_as_driver if scheduler.chance(f"driver at {number}", self._drivers) else self._work
            if self._tasks == 1 and scheduler.chance(f"loop at {number}", 0.3):
                work = self._work_as_loop
            thread = scheduler.start(process.name, process, partial(self._own, config, process, work))
            living.append((process, thread))
            self._wait(thread, (1.0, 3.0, 8.0, 40.0)[scheduler.decide(f"life of {number}", 4)])
            if thread.is_alive() and not scheduler.chance(f"two owners at {number}", 0.5):
                if scheduler.chance(f"end of {number}", 0.5):
                    scheduler.note(f"{process.name} is killed")
                    scheduler.kill(process)
                else:
                    self._stop(process)
                    self._wait(thread, PATIENCE_S)
            self._look_after_servers()
            self._between(number)
        self._over = True
        for process, thread in living:
            self._stop(process)
            self._wait(thread, PATIENCE_S)
            if thread.is_alive():
                raise Wrong(f"{process.name} did not end within {PATIENCE_S:.0f} s")
            scheduler.kill(process)

    def _between(self, number: int) -> None:
        """What may happen between two owners, or while one lives."""
        scheduler = self.scheduler
        if not self._loops and scheduler.chance(f"a long time after {number}", 0.15):
            scheduler.note("a day passes")
            scheduler.sleep(26 * 3600.0)
            self._look_after_servers()
            self.broker.compact_all()
        if scheduler.chance(f"gc after {number}", 0.25):
            machine = f"machine-{scheduler.decide(f'machine of gc {number}', 2)}"
            self._in_process(f"gc-{number}", machine, partial(self._collect, at_peace=False))
        if self._tasks == 1 and scheduler.chance(f"rollback after {number}", 0.15):
            self._in_process(
                f"rollback-{number}", "machine-2", lambda config: go_back(self, config, f"rollback-{number}")
            )

    def _stop(self, process: Process) -> None:
        """SIGTERM: a loop ends after its current message."""
        if process.alive and process.name in self._loops:
            self._loops[process.name].loop.stop()

    def _wait(self, thread: Thread, seconds: float) -> None:
        until = self.scheduler.now + seconds
        while thread.is_alive() and self.scheduler.now < until:
            thread.join(min(2.0, until - self.scheduler.now))
            if self._loops and not self._over:
                end = self.broker.end(TOPIC, 0, only_settled=False)
                self._feed(end + self.scheduler.decide(f"input after {end}", 6))
            self._look_after_servers()

    def _look_after_servers(self) -> None:
        self.broker.look()
        self.broker.let_neighbour_write(self._topic, _NEIGHBOUR, goes_on=not self._over)
        self.bucket.expire()

    # --- the job -------------------------------------------------------------------------------------------------

    def _config(self, machine: str, number: int, **more: Any) -> JobConfig:
        """The configuration with which the owner of this number starts: teams move between backends."""
        decide = self.scheduler.decide
        both = list(BACKENDS)
        kinds = [[both[0]], [both[1]], both]
        first = kinds[decide("backends", 3)]
        # a backend comes and goes only while another one has the state: from one to both to the other
        backup = both if number and decide(f"both at {number}", 3) == 0 else first
        mapping: dict[str, object] = {
            "job.name": self._name,
            "kafka.bootstrap.servers": f"memory:{self._name}",
            "blob.store.uri": f"memory://{self._name}",
            "state.dir": str(self._directory / machine),
            "task.backup.factories": backup,
            "task.restore.factories": both if decide(f"restore order at {number}", 2) else both[::-1],
            "job.tasks": self._tasks,
            "task.inputs": [TOPIC],
            "task.commit.ms": 3000,
            "task.commit.timeout.ms": 20_000,
            "task.commit.snapshot.interval": (["1 commit"], ["2 commits"], ["50 commits"])[decide("snapshots", 3)],
            "task.checkpoint.retained": 1 + decide("retained", 3),
            "blob.store.retry.policy.max.retry.duration.millis": 15_000,
            **{f"stores.{store}.type": "memory" for store in STORES},
            **{f"stores.{store}.value.serde": "bytes" for store in STORES},
            **{f"stores.{store}.write.batch.size": (1, 5000)[decide("write batch", 2)] for store in STORES},
        }
        return JobConfig.from_mapping(mapping | more)

    def services(self, config: JobConfig) -> Services:
        """The services of a process."""
        machine = config.state_dir.name
        ahead_s = (0.0, 0.0, 40.0, -40.0)[self.scheduler.decide(f"clock of {machine}", 4)]
        clock = Clock(self.scheduler, ahead_s)
        ids = IdSource(time_ns=lambda: clock.time_ns() + next(self._numbers), token=self.scheduler.token)
        made = open_services(config, clock, ids, Executors())
        return replace(made, owner=Owner(machine, next(self._numbers), "simulated"))

    def _own(self, config: JobConfig, process: Process, work: Callable[[StateManager, Process, int], None]) -> None:
        """The life of an owner: it opens, processes, commits, and opens again after an error."""
        for life in count():
            if self._over or life > 3:
                return
            try:
                with StateManager(config, services=self.services) as manager:
                    work(manager, process, life)
                return
            except StatemgrError as error:
                self.scheduler.note(f"{type(error).__name__}: {error.message}")
                self.expect(error)
            self.scheduler.sleep(1.0)

    def expect(self, error: StatemgrError) -> None:
        if error.exit_status not in (3, 5, 6) and type(error).__name__ not in _EXPECTED:
            raise Wrong(f"unexpected {type(error).__name__}: {error}") from error

    def _work(self, manager: StateManager, process: Process, life: int) -> None:
        decide, acked = self.scheduler.decide, self.acked
        with manager.open_task(TASK) as task:
            at = Reached(self._check(task, acked))
            self.scheduler.note(f"opened at {at.position}")
            for turn in range(2 + decide(f"turns of {process.name} {life}", 8)):
                if self._over:
                    break
                moment = f"{process.name} {life} {turn}"
                self._change_some(task, at, decide(f"changes {moment}", 5))
                self.scheduler.sleep(0.1 * decide(f"rest {moment}", 30))
                try:
                    self._commit(task, at, moment)
                except (RetryableError, OutcomeUnknownError) as error:
                    if decide(f"gives up {moment}", 2):
                        raise
                    if self._may_be_published(error):
                        at.changed.add("perhaps none")
                    self.scheduler.note(f"goes on after {type(error).__name__}: {error.message}")

    def _commit(self, task: Task, at: Reached, moment: str) -> None:
        """Commit, and sometimes process more meanwhile. Raises: as ``Task.commit``; then the task may go on."""
        before, done, position = task.last_checkpoint, at.changed, at.position
        meanwhile = self.scheduler.decide(f"meanwhile {moment}", 6)
        with self._committing(position):
            if meanwhile > 2:
                checkpoint = task.commit({SOURCE: position})
                at.changed = set()
            else:
                started, at.changed = task.commit_async({SOURCE: position}), set()
                self._change_some(task, at, meanwhile)
                try:
                    checkpoint = started.result()
                except StatemgrError:
                    at.changed |= done
                    task.forgive()
                    raise
        if checkpoint.input_offsets != {SOURCE: position}:
            raise Wrong(f"a commit of {position} returned {checkpoint.input_offsets}")
        self._check_state_ids(before, checkpoint, done)

    @contextmanager
    def _committing(self, position: int) -> Iterator[None]:
        """A block that commits a position."""
        self.tried[position] += 1
        self.scheduler.trace(f"commit {position}")
        try:
            yield
        except RetryableError as error:
            if not self._may_be_published(error):
                self.tried[position] -= 1
            raise
        self.acked = max(self.acked, position)
        self._acks += 1
        self.scheduler.note(f"committed {position}")

    def _may_be_published(self, error: StatemgrError) -> bool:
        return not isinstance(error, RetryableError) or error.message.startswith("the commit did not end")

    def _change_some(self, task: Task | Attempt, at: Reached, changes: int) -> None:
        """Process some input."""
        for number in range(at.position, at.position + changes):
            at.changed.add(self.process(task, number))
            at.position += 1

    def _feed(self, end: int) -> None:
        """Let the input have records up to this offset."""
        for _ in range(self.broker.end(TOPIC, 0, only_settled=False), end):
            self.broker.append(TOPIC, 0, b"", b"")

    def process(self, task: Task | Attempt, number: int) -> str:
        """Process the input at an offset. Returns: the store that it has changed."""
        self._feed(number + 1)
        store, key, value = self._change(number)
        task.store(store).delete(key) if value is None else task.store(store).put(key, value)
        return store

    def _work_as_loop(self, manager: StateManager, process: Process, life: int) -> None:
        """The work of a member of the consumer group."""
        self._loops[process.name] = member = Loop(self, manager)
        try:
            member.run()
        finally:
            del self._loops[process.name]

    def _work_as_driver(self, manager: StateManager, process: Process, life: int) -> None:
        """The work of an engine's driver, which publishes what its executors prepare."""
        decide, config, acked = self.scheduler.decide, manager.config, self.acked
        epoch = manager.acquire()
        with closing(self.services(config)) as services:
            host = AttemptHost(services)
            if self._prepared:
                self._publish_late(manager, self._prepared)
            for turn in range(2 + decide(f"turns of {process.name} {life}", 6)):
                if self._over:
                    break
                moment = f"{process.name} {life} {turn}"
                prepared: list[PreparedCommit] = []
                position = self._attempt(manager, epoch, host, acked, moment, prepared)
                for other in list(epoch.checkpoints)[1:]:
                    self._attempt_other(manager, epoch, host, other, position, prepared)
                self._prepared = prepared
                self.scheduler.sleep(0.1 * decide(f"rest {moment}", 30))
                with self._committing(position):
                    published = manager.publish(prepared)
                epoch = replace(epoch.after_publish(), checkpoints=published, refill=manager.damaged())

    def _attempt(
        self,
        manager: StateManager,
        epoch: Epoch,
        host: AttemptHost,
        acked: int,
        moment: str,
        done: list[PreparedCommit],
    ) -> int:
        """An executor's work on the first task. Returns: the new position."""
        checkpoint = epoch.checkpoints[TASK]
        with self._opened(manager, TASK, epoch, host) as attempt:
            at = Reached(self.compare(checkpoint, attempt, acked))
            self.scheduler.note(f"an attempt begins at {at.position}")
            self._change_some(attempt, at, self.scheduler.decide(f"changes {moment}", 5))
            done.append(attempt.prepare({SOURCE: at.position}))
        return at.position

    def _attempt_other(
        self,
        manager: StateManager,
        epoch: Epoch,
        host: AttemptHost,
        task: str,
        position: int,
        done: list[PreparedCommit],
    ) -> None:
        """An executor's work on another task, which only stores the position."""
        checkpoint = epoch.checkpoints[task]
        with self._opened(manager, task, epoch, host) as attempt:
            self._compare_other(checkpoint, attempt)
            attempt.store(STORES[0]).put(b"at", b"%d" % position)
            done.append(attempt.prepare({SOURCE: position}))

    @contextmanager
    def _opened(self, manager: StateManager, task: str, epoch: Epoch, host: AttemptHost) -> Iterator[Attempt]:
        try:
            attempt = open_attempt(manager.config, task, epoch.checkpoints[task], epoch, host=host)
        except (MissingError, CorruptError):
            manager.confirm()  # a newer owner may have evicted the checkpoint
            raise
        with attempt:
            yield attempt

    def _publish_late(self, manager: StateManager, prepared: list[PreparedCommit]) -> None:
        """A driver is given commits that were prepared for an older one."""
        with suppress(FencedError, InvalidError):
            manager.publish(prepared)
            raise Wrong("commits that were prepared for an older owner were published")

    # --- the model -----------------------------------------------------------------------------------------------

    def _change(self, number: int) -> tuple[str, bytes, bytes | None]:
        """The change at an offset of the input."""
        drawn = self.scheduler.decide(f"change {number}", 1000)
        key = b"key-%d" % (drawn % 7)
        value = None if drawn % 5 == 0 else (b"%d" % number).ljust(self._width or drawn % 40, b".")
        return STORES[drawn % 2], key, value

    def state_at(self, position: int) -> State:
        """What the changes before an offset make."""
        state: State = {store: {} for store in STORES}
        for number in range(position):
            store, key, value = self._change(number)
            if value is None:
                state[store].pop(key, None)
            else:
                state[store][key] = value
        return state

    def _check(self, task: Task, acked: int) -> int:
        """Compare what an opening found. Returns: its position in the input."""
        return self.compare(task.last_checkpoint, task, acked)

    def compare(self, checkpoint: Checkpoint | None, opened: Task | Attempt, acked: int) -> int:
        position = checkpoint.input_offsets[SOURCE] if checkpoint is not None else 0
        if position < min(acked, self.acked, *self.going_back):  # a rollback may have gone back since
            raise Wrong(f"opened at {position}, but {acked} was acknowledged before")
        if self.tried[position] < 1:
            raise Wrong(f"opened at {position}, which nobody has committed")
        self._compare_state(position, {store: dict(opened.store(store).range()) for store in STORES})
        return position

    def _compare_state(self, position: int, found: State) -> None:
        expected = self.state_at(position)
        if found != expected:
            raise Wrong(f"other state at {position}: {_difference(found, expected)}")

    def _compare_other(self, checkpoint: Checkpoint | None, opened: Task | Attempt) -> None:
        found = dict(opened.store(STORES[0]).range())
        if found != ({b"at": b"%d" % checkpoint.input_offsets[SOURCE]} if checkpoint is not None else {}):
            raise Wrong(f"another task opened with other state: {found}")

    def _check_state_ids(self, before: Checkpoint | None, after: Checkpoint, changed: set[str]) -> None:
        if before is None or not changed <= set(STORES):
            return
        for store in STORES:
            is_new = before.stores.get(store) != after.stores[store]
            if is_new != (store in changed):
                raise Wrong(f"{store} has {'a new' if is_new else 'the same'} state ID after changes of {changed}")

    # --- peace ---------------------------------------------------------------------------------------------------

    def _peace(self) -> None:
        """Without faults, everything works, and everything is as it should be."""
        scheduler = self.scheduler
        scheduler.sleep(1000.0)
        self._look_after_servers()
        both = {"task.backup.factories": list(BACKENDS)}
        self._in_process("last owner", "machine-0", self._last_owner, both)
        at_once = scheduler.decide("older checkpoints at once", 2)
        if at_once:
            self._in_process("older checkpoints", "new", self._restore_retained, both)
        scheduler.sleep(31 * DAY_S)
        self._look_after_servers()
        self.broker.compact_all()
        for factory in BACKENDS:
            alone = {**both, "task.restore.factories": [factory]}
            self._in_process(f"restore from {factory}", f"new-{factory}", self._reopen, alone)
        self._in_process("gc", "machine-0", partial(self._collect, at_peace=True), both)
        if not at_once:
            self._in_process("older checkpoints", "new", self._restore_retained, both)

    def _in_process(
        self, name: str, machine: str, work: Callable[[JobConfig], None], more: dict[str, Any] | None = None
    ) -> None:
        process = Process(name, machine)
        config = self._config(machine, 0, **(more or {}))
        thread = self.scheduler.start(name, process, lambda: work(config))
        self._wait(thread, PATIENCE_S)
        if thread.is_alive():
            raise Wrong(f"{name} did not end within {PATIENCE_S:.0f} s")
        self.scheduler.kill(process)

    def _last_owner(self, config: JobConfig) -> None:
        acked = self.acked
        with StateManager(config, services=self.services) as manager, manager.open_task(TASK) as task:
            at = Reached(self._check(task, acked))
            for _ in range(2):
                self._change_some(task, at, 3)
                with self._committing(at.position):
                    task.commit({SOURCE: at.position})
        for number in range(1, self._tasks):
            with StateManager(config, services=self.services) as manager, manager.open_task(task_name(number)) as task:
                self._compare_other(task.last_checkpoint, task)

    def _reopen(self, config: JobConfig) -> None:
        with StateManager(config, services=self.services) as manager, manager.open_task(TASK) as task:
            if self._check(task, self.acked) != self.acked:
                raise Wrong("the last commit is not the current one")

    def _restore_retained(self, config: JobConfig) -> None:
        """Restore every retained checkpoint."""
        with closing(self.services(config)) as services, closing(CheckpointTopic(config, services.clock)) as log:
            checkpoints = log.read()[TASK].checkpoints
            if not min(config.retained, self._acks) <= len(checkpoints) <= config.retained:
                raise Wrong(f"{len(checkpoints)} checkpoints are retained, not {config.retained}")
            for number, checkpoint in enumerate(checkpoints):
                older, newer = checkpoints[number + 1 :], checkpoints[:number][::-1]
                try:
                    stores, _ = restore_task(services, TASK, checkpoint, older=older, newer=newer)
                except MissingState:
                    if all(checkpoint.marker(BACKENDS[0], store) for store in STORES):
                        raise
                    continue  # compaction may have changed what an older checkpoint needs
                found: State = {name: dict(store.content.scan(None, None)) for name, store in stores.items()}
                for store in stores.values():
                    store.close()
                self._compare_state(checkpoint.input_offsets[SOURCE], found)

    def _collect(self, config: JobConfig, *, at_peace: bool) -> None:
        with closing(self.services(config)) as services, closing(CheckpointTopic(config, services.clock)) as log:
            try:
                report = collect_garbage(services, log, no_progress, delete=True)
            except StatemgrError as error:
                if at_peace or not isinstance(error, MissingState | PermissionNeeded):
                    self.expect(error)
                if at_peace:
                    raise
                return
            self.scheduler.note(f"gc deletes {report.deleted.blobs} blobs")
            if report.missing or (at_peace and (report.failed or report.expiring)):
                raise Wrong(f"gc: missing {report.missing}, failed {report.failed}, expiring {report.expiring}")
            if not at_peace:
                return
            needed = set(find_needed_blobs(services, log, allow_no_checkpoints=False).needed)
        left = self.bucket.names()
        if left != needed:
            raise Wrong(
                f"after gc: {len(left - needed)} blobs too many {sorted(left - needed)[:3]}, "
                f"missing {sorted(needed - left)[:3]}"
            )


_EXPECTED = {"FencedError", "OutcomeUnknownError", "RetryableError", "UnavailableError"}


def _difference(found: State, expected: State) -> str:
    for store in STORES:
        for key in sorted(found[store].keys() | expected[store].keys()):
            have, want = found[store].get(key), expected[store].get(key)
            if have != want:
                return f"{store}[{key!r}] is {have!r}, and should be {want!r}"
    return "none"
