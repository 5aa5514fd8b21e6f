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
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

from statemgr import JobConfig
from statemgr.backends.blobs import backup, segment_batch
from statemgr.consumer.loop import ConsumerLoop
from statemgr.engine import PreparedCommit
from statemgr.errors import (
    MissingState,
    StatemgrError,
)
from statemgr.flows.committing import background_snapshots
from statemgr.flows.committing.limits import check_config
from statemgr.flows.opening import open_job
from statemgr.ids import IdSource, task_name
from statemgr.local import shared_directories
from statemgr.local.machine import SystemClock
from statemgr.model import codecs
from statemgr.model.checkpoint import CheckpointKey
from statemgr.model.checkpoint import Owner as PublishedBy
from statemgr.model.jobs.stages import Stage
from statemgr.phases import Phase, add_observer, remove_observer
from statemgr.services import Services
from statemgr.telemetry import metrics
from statemgr.transfer import downloads
from statemgr.wiring import open_services
from tests.simulation.losses import Losses
from tests.simulation.model import BACKENDS, DAY_S, PLUG_IN, SOURCE, STORES, TASK, TOPIC, Model, Wrong
from tests.simulation.operators import Operators
from tests.simulation.owners import (
    Driver,
    LoopMember,
    Owner,
    OwnerOfAll,
    TaskOwner,
    live,
)
from tests.simulation.peace import Peace
from tests.simulation.scheduler import Scheduler
from tests.simulation.servers import Broker, Faults, Network, SimulatedBlobStore, served
from tests.simulation.threads import Executors, Thread
from tests.simulation.turns import Process

#: Seconds after which compaction may remove a record of a changelog (changelog.min.compaction.lag.ms).
_COMPACTED_S = 4 * 3600.0 + 1.0
#: Each new process looks for installed plugins, which takes as long as the rest of its start. Nothing is installed here
#: meanwhile.
_plugins = cache(importlib.metadata.entry_points)
#: Seconds after which an operation that has no end is a fault: no deadline of the configurations is longer. The time
#: for which its process was suspended does not count.
PATIENCE_S = 3600.0
#: What may have happened when bytes are wrong, or something is missing.
_DAMAGE = {"flipped bit", "lost blob", "damaged blob", "cut changelog", "lost tail", "deleted changelog"}
#: A key of rows of each partition of the input. It belongs to the task of this number, whatever their number is.
_ROWS = (b"b", b"d", b"c", b"f")
#: The key of another job's records on the checkpoint topic.
_NEIGHBOUR = codecs.encode_key(CheckpointKey("neighbour", "0", 0, TASK, 2, 1))


def _checked_once() -> Callable[[JobConfig], None]:
    """:func:`check_config`, once for each configuration: it is pure, and encodes the largest possible record."""
    checked = set[str]()

    def check(config: JobConfig) -> None:
        given = repr({key: value for key, value in config.values.items() if key != "state.dir"})
        if given not in checked:
            check_config(config)
            checked.add(given)

    return check


class Clock(SystemClock):
    """The clock of one machine, which may be wrong."""

    def __init__(self, ahead_s: float) -> None:
        super().__init__()
        self._ahead_ns = int(ahead_s * 1e9)

    def time_ns(self) -> int:
        return super().time_ns() + self._ahead_ns


class _Series:
    """A metric of ``prometheus_client`` that nobody reads: counting would take a twentieth of the time."""

    def __init__(self, *args: object, **more: object) -> None:
        pass

    def labels(self, *labels: object) -> _Series:
        return self

    def inc(self, amount: float = 1) -> None:
        pass

    set = observe = inc

    def remove(self, *labels: object) -> None:
        pass


class _OfEachProcess:
    """A variable of a module, which each simulated process has for itself."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._of: dict[Process, Any] = {}

    def _own(self) -> Any:
        assert Scheduler.active is not None
        assert Scheduler.active.current is not None
        process = Scheduler.active.current.process
        if process not in self._of:
            self._of[process] = self._make()
        return self._of[process]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __setitem__(self, key: object, value: object) -> None:
        self._own()[key] = value


@dataclass(frozen=True)
class _Started:
    """An owner, which lives or is dead."""

    process: Process
    thread: Thread
    config: JobConfig
    kind: type[Owner]


class History:
    """One history.

    Args:
        seed: decides all of it.
        without: kinds of faults that do not happen, for a shorter story.
        owners: how many there are; None lets the seed decide.
        quiet: events that do not happen.

    Attributes:
        seen: what has happened how often.
    """

    def __init__(
        self,
        seed: int,
        *,
        without: frozenset[str] = frozenset(),
        owners: int | None = None,
        quiet: frozenset[str] = frozenset(),
    ) -> None:
        self.seed = seed
        self.scheduler = scheduler = Scheduler(seed, quiet=quiet)
        self.network = network = Network(scheduler, self._faults(without))
        scheduler.before_file = network.before_file
        self.directory = Path()
        self.name = f"simulated-{seed}"
        self.model = Model(scheduler)
        self.model.was_damaged = lambda: not _DAMAGE.isdisjoint(self.seen)
        #: store → the stage of a migration that the configuration file asks for; empty if the job does not migrate
        self.stages: dict[str, Stage] = {}
        if scheduler.decide("migrates", 4) == 0:
            self.stages = dict.fromkeys(STORES, Stage(1 + scheduler.decide("first stage", 4)))
        #: what executors have prepared for the last driver
        self.prepared: list[PreparedCommit] = []
        #: how often an owner is the driver of an engine
        self._drivers = (0.0, 0.4, 0.9)[scheduler.decide("drivers", 3)]
        #: the tasks of the job; only a driver works on those after the first
        self.tasks = 1 + (scheduler.decide("tasks", 3) == 0)
        self._numbers = count()
        self.over = False
        self.operators, self.losses, self.peace = Operators(self), Losses(self), Peace(self)
        #: process → the loop that runs in it
        self.loops: dict[str, ConsumerLoop] = {}
        self.owners: list[_Started] = []
        #: the configurations of owners that lived when an operator took the last step of a migration
        self._outdated: list[JobConfig] = []
        self._lifetimes = owners or 3 + scheduler.decide("lifetimes", 5)

    @property
    def seen(self) -> dict[str, int]:
        return self.network.seen

    def run(self) -> None:
        """Live it. Raises: Wrong, Stuck, or any error that an operation must not raise."""
        logging.disable(logging.CRITICAL)
        shm = Path("/dev/shm")
        # tasks share a blob if records do not hold their segments, and if one waits for the other, which may be late
        inline, linger_s = (0, 1.0) if self.has_owners_of_all else (backup._INLINE_SEGMENT, segment_batch.LINGER_S)
        self.directory = Path(tempfile.mkdtemp(prefix="simulated-", dir=shm if shm.is_dir() else None))
        try:
            with (
                mock.patch.object(importlib.metadata, "entry_points", _plugins),
                mock.patch.object(tempfile, "tempdir", str(self.directory)),
                mock.patch.dict(os.environ, SHARED_STATE=str(self.directory / "shared")),
                mock.patch.object(open_job, "check_config", _checked_once()),
                mock.patch.multiple(metrics, Counter=_Series, Gauge=_Series, Histogram=_Series),
                mock.patch.object(downloads, "processors", return_value=2),  # the same history on every machine
                mock.patch.object(backup, "_INLINE_SEGMENT", inline),
                mock.patch.object(segment_batch, "LINGER_S", linger_s),
                mock.patch.object(background_snapshots, "_PATIENCE", _OfEachProcess(background_snapshots._Patience)),
                mock.patch.object(shared_directories, "_files", _OfEachProcess(WeakValueDictionary)),
            ):
                self.scheduler.run(self._live)
        finally:
            logging.disable(logging.NOTSET)
            shutil.rmtree(self.directory, ignore_errors=True)

    # --- the world -----------------------------------------------------------------------------------------------

    def _faults(self, without: frozenset[str]) -> Faults:
        faults = Faults()
        for kind, rates in {
            "lost_request": (0, 0.01, 0.05), "lost_answer": (0, 0.01, 0.05), "refused_record": (0, 0, 0.01),
            "kill": (0, 0.004, 0.01), "pause": (0, 0.002, 0.006), "blob_fails": (0, 0.02, 0.1), "slow": (0, 0.01, 0.03),
            "outage": (0, 0.0005, 0.002), "flipped_bit": (0, 0, 0.03), "disk": (0, 0, 0.003), "late_list": (0, 0, 0.3),
            "refused_tag": (0, 0, 0.1),
        }.items():  # fmt: skip
            rate = rates[self.scheduler.decide(f"rate of {kind}", 3)]
            setattr(faults, kind, 0.0 if kind in without else rate)
        return faults

    def _live(self) -> None:
        scheduler, network = self.scheduler, self.network
        self.topic = self.config("", 0).checkpoint_topic
        self.broker = broker = Broker(network)
        with served(broker, f"memory:{self.name}"):
            self.bucket: SimulatedBlobStore = SimulatedBlobStore(SystemClock(), self.name)
            self.bucket.network = network
            broker.create(TOPIC, self.tasks)
            self.model.is_there = partial(broker.has_record, self.topic)
            add_observer(self._observe)
            try:
                self._trouble()
                network.faults = Faults()
                scheduler.note("peace")
                self.peace.check()
            finally:
                remove_observer(self._observe)

    def _observe(self, phase: Phase, subject: str) -> None:
        self.network.step(phase.value)

    def _trouble(self) -> None:
        """Owners live and die, one after the other, and sometimes two at a time."""
        scheduler = self.scheduler
        if self.adopts:
            self.operators.begin_with_an_old_job()
        for number in range(self._lifetimes):
            machine = f"machine-{scheduler.decide(f'machine of {number}', 2)}"
            if scheduler.chance(f"disk lost before {number}", 0.25):
                scheduler.note(f"{machine} loses its disk")
                for owner in self.owners:
                    if owner.process.machine == machine:
                        scheduler.kill(owner.process)
                shutil.rmtree(self.directory / machine, ignore_errors=True)
            if scheduler.chance(f"bits rot before {number}", 0.25):
                self.losses.rot(machine, number)
            if (
                number == self.losses.topic_is_deleted_before
                and not self.model.was_rescaled
                and not self.operators.copies
            ):
                self.losses.delete_checkpoint_topic(machine, number)
            process = Process(f"owner-{number}", machine)
            config = self.config(machine, number)
            kind: type[Owner] = Driver if scheduler.chance(f"driver at {number}", self._drivers) else TaskOwner
            if self.tasks == 1 and scheduler.chance(f"loop at {number}", 0.3):
                kind = LoopMember
            if kind is TaskOwner and self.has_owners_of_all:
                kind = OwnerOfAll
            thread = scheduler.start(process.name, process, partial(live, self, config, process, kind, self.parts))
            self.owners.append(_Started(process, thread, config, kind))
            self.wait(thread, (1.0, 3.0, 8.0, 40.0)[scheduler.decide(f"life of {number}", 4)])
            if thread.is_alive() and not scheduler.chance(f"two owners at {number}", 0.5):
                if scheduler.chance(f"end of {number}", 0.5):
                    scheduler.note(f"{process.name} is killed")
                    scheduler.kill(process)
                else:
                    self.stop(process)
                    self.wait(thread, PATIENCE_S)
            self.look_after_servers()
            self._between(number)
        self.over = True
        for owner in self.owners:
            self.stop(owner.process)
            self.wait_for(owner.thread, owner.process)
            scheduler.kill(owner.process)

    def _between(self, number: int) -> None:
        """What may happen between two owners, or while one lives."""
        scheduler = self.scheduler
        # compaction would use records beyond the older checkpoint that is the newest one after a loss
        is_near = not self.has_member and not self.model.losses
        if is_near and scheduler.chance(f"a long time after {number}", 0.15):
            days = (1.1, 1.1, 9.0)[scheduler.decide(f"how long after {number}", 3)]
            scheduler.note(f"{days} days pass")
            scheduler.sleep(_COMPACTED_S)
            self.broker.compact_all()  # from here on the broker counts the time for which it keeps deletes
            scheduler.sleep(days * DAY_S)
            self.look_after_servers()
            self.broker.compact_all()
        is_suspended = any(one.process.alive and one.process.paused_until > scheduler.now for one in self.owners)
        collects = scheduler.chance(f"gc after {number}", 0.6 if is_suspended else 0.2)
        if collects:
            self.operators.let_collect()
            machine = f"machine-{scheduler.decide(f'machine of gc {number}', 2)}"
            self.in_process(f"gc-{number}", machine, partial(self.peace.collect, at_peace=False))
        self.operators.act(number)
        if self.loses and scheduler.chance(f"a loss after {number}", 0.2):
            self.losses.lose(f"after {number}")
        if self.loses_checkpoints and scheduler.chance(f"checkpoints are lost after {number}", 0.3):
            self.losses.lose_checkpoints(f"after {number}")

    @property
    def has_member(self) -> bool:
        """Whether a member of the consumer group lives, which may be between two lives."""
        return any(owner.kind is LoopMember and owner.thread.is_alive() for owner in self.owners)

    def take_step(self, stores: Sequence[str], stage: Stage) -> None:
        """An operator changes the configuration file. Who lives goes on with the older configuration."""
        self.stages |= dict.fromkeys(stores, stage)
        self._outdated = [owner.config for owner in self.owners if owner.thread.is_alive()]

    def expect(self, error: StatemgrError, config: JobConfig) -> None:
        """Raises: Wrong for an error that no situation explains."""
        if not self._lacks_a_backend(error, config):
            self.model.expect(error)

    def _lacks_a_backend(self, error: StatemgrError, config: JobConfig) -> bool:
        """Whether an opening with this configuration was refused because the backend to restore from got no commit: an
        owner with an older configuration, which lived when an operator took a step, has committed without it, or
        owners with the present configuration have, and this one is older."""
        if not isinstance(error, MissingState) or "has no marker of it" not in error.message:
            return False
        store = str(error.where["store"])
        restores, owners = config.stores[store].restore_factories, [*self._outdated, self.config("", 0)]
        return any(set(restores).isdisjoint(owner.stores[store].backup_factories) for owner in owners)

    @property
    def loses(self) -> bool:
        """Whether both backends always have the state, so that one of them may lose something."""
        has_both = not self.stages and self.scheduler.decide("backends", 3) == 2
        return has_both and not self.loses_checkpoints and not self.adopts

    @property
    def plugs_in(self) -> bool:
        """Whether some owners feed a backend of another package, too."""
        return not self.stages and self.scheduler.decide("plugs in", 6) == 0

    @property
    def adopts(self) -> bool:
        """Whether other software has run the job before."""
        may_adopt = self.tasks == 1 and not self.stages and self.model.ttl_s is None
        return may_adopt and self.scheduler.decide("adopts", 4) == 0

    @property
    def loses_checkpoints(self) -> bool:
        """Whether the checkpoint topic may lose its newest records. A changelog always has the state: the blobs of an
        older checkpoint may be deleted."""
        decide, may_lose = self.scheduler.decide, self.tasks == 1 and not self.stages
        return may_lose and decide("backends", 3) > 0 and decide("loses checkpoints", 4) == 0

    @property
    def adds_partitions(self) -> bool:
        """Whether the operator adds partitions to the topic for a rescale to more tasks, and its rows have the keys of
        the changes, which may belong to another task then."""
        return self.scheduler.decide("adds partitions", 2) == 0

    @property
    def has_owners_of_all(self) -> bool:
        """Whether an owner of a task works on all of them, which share blobs."""
        return self.tasks > 1 and self.scheduler.decide("owner of all", 3) == 0

    @property
    def keeps_managers(self) -> bool:
        """Whether a process that opens a task again does so with the same manager."""
        return self.loses_checkpoints and self.scheduler.decide("keeps managers", 2) == 0

    @property
    def _jumps(self) -> bool:
        """Whether an owner may have another backend than the one before it, and none of it."""
        stays = self.stages or self.loses or self.loses_checkpoints
        return not stays and self.scheduler.decide("jumps", 3) == 0

    def jumps_to_blobs(self, number: int) -> bool:
        """Whether the owner of this number has changelogs alone, and the next one blobs alone."""
        stores = (self.config("", of).stores[STORES[0]] for of in (number, number + 1)) if self._jumps else ()
        return [store.backup_factories for store in stores] == [BACKENDS[1:], BACKENDS[:1]]

    @property
    def lost_blobs(self) -> bool:
        return "lost blob" in self.seen or "damaged blob" in self.seen

    def stop(self, process: Process) -> None:
        """SIGTERM: a loop ends after its current message."""
        if process.alive and process.name in self.loops:
            self.loops[process.name].stop()

    def wait(self, thread: Thread, seconds: float) -> None:
        until = self.scheduler.now + seconds
        while thread.is_alive() and self.scheduler.now < until:
            thread.join(min(2.0, until - self.scheduler.now))
            if not self.over and self.has_member:
                for _, model in self.parts:
                    end = self.end(model.source)
                    named = f"input after {end}" if model.source == SOURCE else f"input of {model.source} after {end}"
                    self.feed(end + self.scheduler.decide(named, 6), model.source)
            self.look_after_servers()

    def look_after_servers(self) -> None:
        self.broker.look()
        self.broker.let_neighbour_write(self.topic, _NEIGHBOUR, goes_on=not self.over)
        self.bucket.expire()

    # --- the job -------------------------------------------------------------------------------------------------

    def config(self, machine: str, number: int, **more: Any) -> JobConfig:
        """The configuration with which the owner of this number starts: teams move between backends."""
        decide = self.scheduler.decide
        both = list(BACKENDS)
        kinds = [[both[0]], [both[1]], both]
        first = kinds[decide(f"backends at {number}" if self._jumps else "backends", 3)]
        # a backend comes and goes while another one has the state, from one to both to the other, unless the job jumps
        backup = both if number and decide(f"both at {number}", 3) == 0 else first
        restore = both if decide(f"restore order at {number}", 2) else both[::-1]
        if self.plugs_in:
            backup = [*backup, PLUG_IN] if decide(f"plug-in at {number}", 3) else backup
            restore = [PLUG_IN, *restore]
        mapping: dict[str, object] = {
            "job.name": self.name,
            "kafka.bootstrap.servers": f"memory:{self.name}",
            "blob.store.uri": f"memory://{self.name}",
            "state.dir": str(self.directory / machine),
            "task.backup.factories": backup,
            "task.restore.factories": restore,
            "job.tasks": self.tasks,
            "task.inputs": [TOPIC],
            "task.commit.ms": 3000,
            "task.commit.timeout.ms": 20_000,
            "task.commit.snapshot.interval": (["1 commit"], ["2 commits"], ["50 commits"])[decide("snapshots", 3)],
            "task.checkpoint.retained": 1 + decide("retained", 3),
            "task.checkpoint.hourly": (0, 0, 0, 3)[decide("hourly", 4)],
            "task.checkpoint.daily": (0, 0, 0, 2)[decide("daily", 4)],
            "blob.store.retry.policy.max.retry.duration.millis": 15_000,
            **{f"stores.{store}.type": "memory" for store in STORES},
            **({f"stores.{STORES[1]}.ttl.ms": int(self.model.ttl_s * 1000)} if self.model.ttl_s else {}),
            **{f"stores.{store}.value.serde": "bytes" for store in STORES},
            **{f"stores.{store}.write.batch.size": (1, 5000)[decide("write batch", 2)] for store in STORES},
        }
        for store, stage in self.stages.items() if "task.backup.factories" not in more else ():
            mapping |= {
                f"stores.{store}.{kind}.factories": factories
                for kind, factories in (("backup", stage.backup), ("restore", stage.restore))
            }
        if "job.name" not in more:
            mapping |= self.operators.layout
        return JobConfig.from_mapping(mapping | more)

    @property
    def parts(self) -> list[tuple[str, Model]]:
        """The tasks that owners open, each with its model."""
        parts = self.operators.parts or [self.model]
        return [(task_name(number), model) for number, model in enumerate(parts)]

    def services(self, config: JobConfig) -> Services:
        """The services of a process."""
        machine = config.state_dir.name
        ahead_s = (0.0, 0.0, 40.0, -40.0)[self.scheduler.decide(f"clock of {machine}", 4)]
        clock = Clock(ahead_s)
        ids = IdSource(time_ns=lambda: clock.time_ns() + next(self._numbers), token=self.scheduler.token)
        made = open_services(config, clock, ids, self.executors())
        return replace(made, owner=PublishedBy(machine, next(self._numbers), "simulated"))

    def executors(self) -> Executors:
        """The threads of a process."""
        return Executors()

    def feed(self, end: int, source: str = SOURCE) -> None:
        """Let a partition of the input have records up to this offset."""
        topic, _, number = source.rpartition("-")
        for offset in range(self.end(source), end):
            key = self.model.row(source, offset, self.broker.partitions(topic)) if self.adds_partitions else None
            self.broker.append(topic, int(number), key or _ROWS[int(number)], b"")

    def end(self, source: str) -> int:
        """Where a partition of the input ends."""
        topic, _, number = source.rpartition("-")
        return self.broker.end(topic, int(number), only_settled=False)

    def in_process(
        self, name: str, machine: str, work: Callable[[JobConfig], None], more: dict[str, Any] | None = None
    ) -> None:
        process = Process(name, machine)
        config = self.config(machine, 0, **(more or {}))
        thread = self.scheduler.start(name, process, lambda: work(config))
        self.wait_for(thread, process)
        self.scheduler.kill(process)

    def wait_for(self, thread: Thread, process: Process) -> None:
        """Wait for a thread of a process. Raises: Wrong if the thread does not end."""
        counted_s, left_s = process.paused_s, PATIENCE_S
        while thread.is_alive() and left_s > 0:
            self.wait(thread, left_s)
            counted_s, left_s = process.paused_s, process.paused_s - counted_s
        if thread.is_alive():
            raise Wrong(f"{process.name} did not end within {PATIENCE_S:.0f} s")
