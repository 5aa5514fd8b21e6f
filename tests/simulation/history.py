"""A history: owners of a job come, commit, die, sleep too long and come back, and a model knows what is right.

The model is small. The input is a sequence of changes that the seed gives, and a checkpoint has read it up to an
offset. So the state of a checkpoint is what the changes before its offset make, and:

- whoever opens a task finds exactly that state, of a checkpoint that somebody has tried to publish
- it is not older than any that an owner was told is published before the opening began
- every operation ends, with a result or a typed error
- when the world is at peace again, the task opens, every backend alone restores the same state, and one collection of
  garbage leaves exactly the blobs that retained checkpoints need
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from statemgr import JobConfig, StateManager
from statemgr.engine.task import Task
from statemgr.errors import FencedError, OutcomeUnknownError, RetryableError, StatemgrError
from statemgr.ids import IdSource
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local.clock import SystemClock
from statemgr.model.checkpoint import Checkpoint, Owner
from statemgr.operations.gc.gc import GarbageReport, collect_garbage
from statemgr.operations.gc.needed_blobs import find_needed_blobs
from statemgr.phases import Phase, add_observer, remove_observer
from statemgr.ports import no_progress
from statemgr.services import Services
from statemgr.wiring import open_services
from tests.simulation.actors import SOURCE, TASK, TOPIC, Driver, Loop, operate
from tests.simulation.scheduler import Executors, Process, Scheduler, Thread
from tests.simulation.servers import Broker, Faults, Network, SimulatedBlobStore, served

STORES = ("totals", "latest")
DAY_S = 86_400.0
#: Seconds after which an operation that has no end is a fault: no deadline of the configurations is longer.
PATIENCE_S = 3600.0
State = dict[str, dict[bytes, bytes]]


class Wrong(AssertionError):
    """The history broke a property."""


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
        self.tried = {0}
        self._numbers = count()
        self.over = False
        #: Process → the loop that runs in it.
        self.loops: dict[str, Loop] = {}
        self._lifetimes = owners or 3 + scheduler.decide("lifetimes", 5)

    @property
    def seen(self) -> dict[str, int]:
        return self.network.seen

    def run(self) -> None:
        """Live it. Raises: Wrong, Stuck, or any error that an operation must not raise."""
        logging.disable(logging.CRITICAL)
        shm = Path("/dev/shm")
        self._directory = Path(tempfile.mkdtemp(prefix="simulated-", dir=shm if shm.is_dir() else None))
        try:
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
        }.items():  # fmt: skip
            rate = rates[self.scheduler.decide(f"rate of {kind}", 3)]
            setattr(faults, kind, 0.0 if kind in without else rate)
        return faults

    def _live(self) -> None:
        scheduler, network = self.scheduler, self.network
        self.broker = broker = Broker(network, lambda: int((scheduler.start_s + scheduler.now) * 1000))
        with served(broker, f"memory:{self._name}"):
            self.bucket: SimulatedBlobStore = SimulatedBlobStore(Clock(scheduler, 0), self._name)
            self.bucket.network = network
            broker.create(TOPIC, 1)
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
            config = self.config(machine, number)
            thread = scheduler.start(process.name, process, partial(self._own, config, process, number))
            living.append((process, thread))
            if scheduler.chance(f"operator after {number}", 0.25):
                living.append(self._operator(number))
            self._wait(thread, 1.0 + scheduler.decide(f"life of {number}", 60))
            if thread.is_alive() and not scheduler.chance(f"two owners at {number}", 0.3):
                if scheduler.chance(f"end of {number}", 0.5):
                    scheduler.note(f"{process.name} is killed")
                    scheduler.kill(process)
                else:
                    self._stop(process)
                    self._wait(thread, PATIENCE_S)
            self._look_after_servers()
        self.over = True
        for process, thread in living:
            self._stop(process)
            self._wait(thread, PATIENCE_S)
            if thread.is_alive():
                raise Wrong(f"{process.name} did not end within {PATIENCE_S:.0f} s")
            scheduler.kill(process)

    def _stop(self, process: Process) -> None:
        """SIGTERM: a loop ends after its current message."""
        if process.alive and process.name in self.loops:
            self.loops[process.name].loop.stop()

    def _operator(self, number: int) -> tuple[Process, Thread]:
        process = Process(f"operator-{number}", "machine-2")
        config = self.config(process.machine, number)
        return process, self.scheduler.start(process.name, process, partial(operate, self, config, process.name))

    def _wait(self, thread: Thread, seconds: float) -> None:
        until = self.scheduler.now + seconds
        while thread.is_alive() and self.scheduler.now < until:
            thread.join(min(2.0, until - self.scheduler.now))
            if self.loops and not self.over:
                end = self.broker.end(TOPIC, 0, only_settled=False)
                self.feed(end + self.scheduler.decide(f"input after {end}", 6))
            self._look_after_servers()

    def _look_after_servers(self) -> None:
        self.broker.expire()
        self.bucket.expire()

    # --- the job -------------------------------------------------------------------------------------------------

    def config(self, machine: str, number: int, **more: Any) -> JobConfig:
        """The configuration with which the owner of this number starts: teams move between backends."""
        decide = self.scheduler.decide
        both = ["blob-store", "kafka-changelog"]
        kinds = [["blob-store"], ["kafka-changelog"], both]
        first = kinds[decide("backends", 3)]
        # a backend comes and goes only while another one has the state: from one to both to the other
        backup = both if number and decide(f"both at {number}", 3) == 0 else first
        mapping: dict[str, object] = {
            "job.name": self._name,
            "kafka.bootstrap.servers": f"memory:{self._name}",
            "blob.store.uri": f"memory://{self._name}",
            "state.dir": str(self._directory / machine),
            "task.backup.factories": backup,
            "task.restore.factories": [*first, *(f for f in both if f not in first)],
            "task.inputs": [TOPIC],
            "task.commit.ms": 3000,
            "task.commit.timeout.ms": 20_000,
            "task.commit.snapshot.interval": (["1 commit"], ["2 commits"], ["50 commits"])[decide("snapshots", 3)],
            "task.checkpoint.retained": 1 + decide("retained", 3),
            "blob.store.retry.policy.max.retry.duration.millis": 15_000,
            **{f"stores.{store}.type": "memory" for store in STORES},
            **{f"stores.{store}.value.serde": "bytes" for store in STORES},
        }
        return JobConfig.from_mapping(mapping | more)

    def services(self, config: JobConfig) -> Services:
        """The services of a process."""
        machine = config.state_dir.name
        ahead_s = (0.0, 0.0, 40.0, -40.0)[self.scheduler.decide(f"clock of {machine}", 4)]
        clock = Clock(self.scheduler, ahead_s)
        ids = IdSource(time_ns=lambda: clock.time_ns() + next(self._numbers), token=self._token)
        made = open_services(config, clock, ids, Executors())
        return replace(made, owner=Owner(machine, next(self._numbers), "simulated"))

    def _token(self) -> str:
        return self.scheduler._urandom(16).hex()

    def _own(self, config: JobConfig, process: Process, number: int) -> None:
        """The life of an owner: it opens, processes, commits, and opens again after an error."""
        kind = self.scheduler.decide(f"kind {number}", 3)
        for life in range(4):
            if self.over:
                return
            turns = 2 + self.scheduler.decide(f"turns of {number} {life}", 8)
            try:
                with StateManager(config, services=self.services) as manager:
                    if kind == 0:
                        Driver(self, manager, process, number).run(turns)
                    elif kind == 1:
                        self._run_loop(manager, process, turns)
                    else:
                        self._work(manager, process, turns)
                return
            except StatemgrError as error:
                self.expect(error)
            self.scheduler.sleep(1.0)

    def _run_loop(self, manager: StateManager, process: Process, turns: int) -> None:
        member = Loop(self, manager)
        self.loops[process.name] = member
        try:
            member.run()
        finally:
            del self.loops[process.name]

    def expect(self, error: StatemgrError) -> None:
        """Note an error that an operation may end with. Raises: Wrong for another one."""
        self.scheduler.note(f"{type(error).__name__}: {error.message}")
        if not isinstance(error, (RetryableError, FencedError, OutcomeUnknownError)):
            raise Wrong(f"unexpected {type(error).__name__}: {error}") from error

    def _work(self, manager: StateManager, process: Process, turns: int) -> None:
        scheduler, acked = self.scheduler, self.acked
        with manager.open_task(TASK) as task:
            position = self.opened(task, acked)
            scheduler.note(f"opened at {position}")
            for turn in range(turns):
                if self.over:
                    break
                position = self.process(task, position, 1 + scheduler.decide(f"changes {process.name} {turn}", 4))
                scheduler.sleep(0.1 * scheduler.decide(f"rest {process.name} {turn}", 30))
                self._commit(task, position)

    def process(self, task: Task, position: int, number: int) -> int:
        """Apply some changes to the stores of a task. Returns: the offset of the next one."""
        self.feed(position + number)
        for offset in range(position, position + number):
            store, key, value = self.change(offset)
            task.store(store).delete(key) if value is None else task.store(store).put(key, value)
        return position + number

    def feed(self, end: int) -> None:
        """Let the input have records up to this offset."""
        for _ in range(self.broker.end(TOPIC, 0, only_settled=False), end):
            self.broker.append(TOPIC, 0, b"", b"")

    def acknowledged(self, checkpoint: Checkpoint) -> None:
        """An owner has learned that this checkpoint is published."""
        self.acked = max(self.acked, checkpoint.input_offsets[SOURCE])

    def _commit(self, task: Task, position: int) -> None:
        self.tried.add(position)
        checkpoint = task.commit({SOURCE: position})
        self.acked = max(self.acked, position)
        self.scheduler.note(f"committed {position}")
        if checkpoint.input_offsets != {SOURCE: position}:
            raise Wrong(f"a commit of {position} returned {checkpoint.input_offsets}")

    # --- the model -----------------------------------------------------------------------------------------------

    def change(self, number: int) -> tuple[str, bytes, bytes | None]:
        """The change at an offset of the input."""
        drawn = self.scheduler.decide(f"change {number}", 1000)
        key = b"key-%d" % (drawn % 7)
        value = None if drawn % 5 == 0 else b"%d" % number + b"." * (drawn % 40)
        return STORES[drawn % 2], key, value

    def state_at(self, position: int) -> State:
        """What the changes before an offset make."""
        state: State = {store: {} for store in STORES}
        for number in range(position):
            store, key, value = self.change(number)
            if value is None:
                state[store].pop(key, None)
            else:
                state[store][key] = value
        return state

    def opened(self, task: Task, acked: int) -> int:
        """Compare what an opening found. Returns: its position in the input."""
        position = self.position(task.last_checkpoint, acked)
        self.check({store: dict(task.store(store).range()) for store in STORES}, position)
        return position

    def position(self, checkpoint: Checkpoint | None, acked: int) -> int:
        """How far a checkpoint has read. Raises: Wrong if it is older than what was acknowledged, or made up."""
        position = checkpoint.input_offsets[SOURCE] if checkpoint is not None else 0
        if position < min(acked, self.acked):
            raise Wrong(f"opened at {position}, but {acked} was acknowledged before")
        if position not in self.tried:
            raise Wrong(f"opened at {position}, which nobody has committed")
        return position

    def check(self, found: State, position: int) -> None:
        """Raises: Wrong if this is not the state at ``position``."""
        if found != (expected := self.state_at(position)):
            raise Wrong(f"other state at {position}: {_difference(found, expected)}")

    def check_collected(self, report: GarbageReport) -> None:
        """Raises: Wrong if a collection of garbage found something lost."""
        if report.missing:
            raise Wrong(f"gc misses {report.missing}")

    # --- peace ---------------------------------------------------------------------------------------------------

    def _peace(self) -> None:
        """Without faults, everything works, and everything is as it should be."""
        scheduler = self.scheduler
        scheduler.sleep(1000.0)
        self._look_after_servers()
        self._in_process("last owner", "machine-0", lambda config: self._last_owner(config))
        for factory in self._backends():
            self._in_process(
                f"restore from {factory}", f"new-{factory}", self._reopen, {"task.restore.factories": [factory]}
            )
        scheduler.sleep(3 * DAY_S)
        self._in_process("gc", "machine-0", self._collect)

    def _backends(self) -> tuple[str, ...]:
        return self.config("machine-0", 0).stores[STORES[0]].backup_factories

    def _in_process(
        self, name: str, machine: str, work: Callable[[JobConfig], None], more: dict[str, Any] | None = None
    ) -> None:
        process = Process(name, machine)
        config = self.config(machine, 0, **(more or {}))
        thread = self.scheduler.start(name, process, lambda: work(config))
        self._wait(thread, PATIENCE_S)
        if thread.is_alive():
            raise Wrong(f"{name} did not end within {PATIENCE_S:.0f} s")
        self.scheduler.kill(process)

    def _last_owner(self, config: JobConfig) -> None:
        acked = self.acked
        with StateManager(config, services=self.services) as manager, manager.open_task(TASK) as task:
            position = self.opened(task, acked)
            for _ in range(2):
                position = self.process(task, position, 3)
                self._commit(task, position)

    def _reopen(self, config: JobConfig) -> None:
        with StateManager(config, services=self.services) as manager, manager.open_task(TASK) as task:
            if self.opened(task, self.acked) != self.acked:
                raise Wrong("the last commit is not the current one")

    def _collect(self, config: JobConfig) -> None:
        with closing(self.services(config)) as services, closing(CheckpointTopic(config, services.clock)) as log:
            report = collect_garbage(services, log, no_progress, delete=True)
            if report.missing or report.failed or report.expiring:
                raise Wrong(f"gc: missing {report.missing}, failed {report.failed}, expiring {report.expiring}")
            needed = set(find_needed_blobs(services, log, allow_no_checkpoints=False).needed)
        left = self.bucket.names()
        if left != needed:
            raise Wrong(
                f"after gc: {len(left - needed)} blobs too many {sorted(left - needed)[:3]}, "
                f"missing {sorted(needed - left)[:3]}"
            )


def _difference(found: State, expected: State) -> str:
    for store in STORES:
        for key in sorted(found[store].keys() | expected[store].keys()):
            have, want = found[store].get(key), expected[store].get(key)
            if have != want:
                return f"{store}[{key!r}] is {have!r}, and should be {want!r}"
    return "none"
