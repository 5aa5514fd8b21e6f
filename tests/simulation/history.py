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
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

from statemgr import JobConfig, StateManager
from statemgr.backends.blobs import backup, segment_batch
from statemgr.consumer.loop import ConsumerLoop
from statemgr.engine import PreparedCommit
from statemgr.errors import (
    CorruptError,
    MissingBlob,
    MissingState,
    PermissionNeeded,
    StatemgrError,
)
from statemgr.flows.committing import background_snapshots
from statemgr.flows.committing.limits import check_config
from statemgr.flows.opening import open_job
from statemgr.flows.opening.restore import restore_task
from statemgr.ids import IdSource, task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local import shared_directories
from statemgr.local.machine import SystemClock
from statemgr.model import codecs
from statemgr.model.checkpoint import CheckpointKey, Retention
from statemgr.model.checkpoint import Owner as PublishedBy
from statemgr.model.jobs.stages import Stage
from statemgr.operations.gc.gc import collect_garbage
from statemgr.operations.gc.needed_blobs import find_needed_blobs
from statemgr.phases import Phase, add_observer, remove_observer
from statemgr.ports import no_progress
from statemgr.services import Services
from statemgr.telemetry import metrics
from statemgr.transfer import downloads
from statemgr.wiring import open_services
from tests.simulation.model import SOURCE, STORES, TASK, TOPIC, Model, State, Wrong
from tests.simulation.operators import Operators
from tests.simulation.owners import (
    Driver,
    LastOwner,
    LoopMember,
    Owner,
    OwnerOfAll,
    Permitted,
    TaskOwner,
    explain,
    live,
)
from tests.simulation.scheduler import Scheduler
from tests.simulation.servers import Broker, Faults, Network, SimulatedBlobStore, served
from tests.simulation.threads import Executors, Thread
from tests.simulation.turns import Process

BACKENDS = ("blob-store", "kafka-changelog")
#: The backend of another package, which docs/extending.md prints.
_PLUG_IN = "examples.plug_ins.shared_directory:SharedDirectory"
DAY_S = 86_400.0
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
#: What one of two backends may lose.
_LOSSES = ("nothing", "blob", "bit", "records", "tail", "topic")
#: A key of rows of each partition of the input. It belongs to the task of this number, whatever their number is.
_ROWS = (b"b", b"d", b"c", b"f")
#: The ends of keys of stores that a copy has of its own.
_OF_COPY = (".backup.factories", ".restore.factories", ".changelog.topic")
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
        self._directory = Path()
        self._name = f"simulated-{seed}"
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
        self.operators = Operators(self)
        #: process → the loop that runs in it
        self.loops: dict[str, ConsumerLoop] = {}
        self._owners: list[_Started] = []
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
        inline, linger_s = (0, 1.0) if self._has_owners_of_all else (backup._INLINE_SEGMENT, segment_batch.LINGER_S)
        self._directory = Path(tempfile.mkdtemp(prefix="simulated-", dir=shm if shm.is_dir() else None))
        try:
            with (
                mock.patch.object(importlib.metadata, "entry_points", _plugins),
                mock.patch.object(tempfile, "tempdir", str(self._directory)),
                mock.patch.dict(os.environ, SHARED_STATE=str(self._directory / "shared")),
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
            shutil.rmtree(self._directory, ignore_errors=True)

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
        self._topic = self.config("", 0).checkpoint_topic
        self.broker = broker = Broker(network)
        with served(broker, f"memory:{self._name}"):
            self.bucket: SimulatedBlobStore = SimulatedBlobStore(SystemClock(), self._name)
            self.bucket.network = network
            broker.create(TOPIC, self.tasks)
            self.model.is_there = partial(broker.has_record, self._topic)
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
        if self._adopts:
            self.operators.begin_with_an_old_job()
        for number in range(self._lifetimes):
            machine = f"machine-{scheduler.decide(f'machine of {number}', 2)}"
            if scheduler.chance(f"disk lost before {number}", 0.25):
                scheduler.note(f"{machine} loses its disk")
                for owner in self._owners:
                    if owner.process.machine == machine:
                        scheduler.kill(owner.process)
                shutil.rmtree(self._directory / machine, ignore_errors=True)
            if scheduler.chance(f"bits rot before {number}", 0.25):
                self._rot(machine, number)
            if number == self._topic_is_deleted_before and not self.model.was_rescaled and not self.operators.copies:
                self._delete_checkpoint_topic(machine, number)
            process = Process(f"owner-{number}", machine)
            config = self.config(machine, number)
            kind: type[Owner] = Driver if scheduler.chance(f"driver at {number}", self._drivers) else TaskOwner
            if self.tasks == 1 and scheduler.chance(f"loop at {number}", 0.3):
                kind = LoopMember
            if kind is TaskOwner and self._has_owners_of_all:
                kind = OwnerOfAll
            thread = scheduler.start(process.name, process, partial(live, self, config, process, kind, self.parts))
            self._owners.append(_Started(process, thread, config, kind))
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
        self.over = True
        for owner in self._owners:
            self._stop(owner.process)
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
            self._look_after_servers()
            self.broker.compact_all()
        is_suspended = any(one.process.alive and one.process.paused_until > scheduler.now for one in self._owners)
        collects = scheduler.chance(f"gc after {number}", 0.6 if is_suspended else 0.2)
        if collects:
            self.operators.let_collect()
            machine = f"machine-{scheduler.decide(f'machine of gc {number}', 2)}"
            self._in_process(f"gc-{number}", machine, partial(self._collect, at_peace=False))
        self.operators.act(number)
        if self._loses and scheduler.chance(f"a loss after {number}", 0.2):
            self._lose(f"after {number}")
        if self.loses_checkpoints and scheduler.chance(f"checkpoints are lost after {number}", 0.3):
            self._lose_checkpoints(f"after {number}")

    def _lose_checkpoints(self, moment: str) -> None:
        """The newest transactions of the checkpoint topic are lost, but not those of the first commits. Perhaps aborted
        records take their offsets at once."""
        transactions = 1 + self.scheduler.decide(f"how many checkpoints are lost {moment}", 3)
        lose = self.broker.lose_tail
        if self.scheduler.decide(f"others take the offsets of checkpoints {moment}", 2):
            lose = partial(self.broker.lose_hidden_tail, longer=True)
        if self.model.may_lose(transactions) and lose(self._topic, transactions):
            self.model.lost(transactions)

    @property
    def _topic_is_deleted_before(self) -> int | None:
        """The number of the owner before which somebody deletes the checkpoint topic; None if nobody does."""
        decide = self.scheduler.decide
        stays = self.stages or self._adopts or self._plugs_in or self.loses_checkpoints
        may_be = self.tasks == 1 and not stays and decide("the checkpoint topic is deleted", 4) == 0
        return 1 + decide("when the checkpoint topic is deleted", 3) if may_be else None

    def _delete_checkpoint_topic(self, machine: str, number: int) -> None:
        """Somebody deletes the checkpoint topic while nobody lives. No opening starts empty while anything shows that
        there was state, until somebody permits it."""
        for owner in self._owners:
            self.scheduler.kill(owner.process)
        self.scheduler.sleep(70.0)  # requests that are late have arrived, and lists are whole
        self._look_after_servers()
        if self._topic not in self.broker.topics:
            return
        self.broker.delete(self._topic)
        self.network.happened("deleted checkpoint topic", f"somebody deletes {self._topic}")
        for store in self.config(machine, 0).stores.values():  # nobody knows whose records a changelog has
            if BACKENDS[1] not in store.backup_factories:
                self.broker.topics.pop(store.changelog_topic, None)
        self.model.begin_again()
        prefix = f"{self._name}/"
        had_state = any(name.startswith(prefix) for name in self.bucket.published())

        def open_without_permission(config: JobConfig) -> None:
            with StateManager(config, services=self.services) as manager, manager.open_task(TASK):
                if had_state:
                    raise Wrong("the job starts empty, although the blob store has published state")

        def process_again(config: JobConfig) -> None:
            with StateManager(config, services=self.services) as manager:
                Permitted(self, manager, f"permitted {number}", self.parts).run()
            ended.append(True)

        ended: list[bool] = []
        for run in range(30):
            work = process_again if run else open_without_permission
            self._in_process(f"permitted-{number}-{run}", machine, partial(self._explained, work))
            if ended:
                return
        raise Wrong("nobody could start empty in 30 runs")

    def _explained(self, work: Callable[[JobConfig], None], config: JobConfig) -> None:
        """Do something that may fail, as the situation explains."""
        try:
            work(config)
        except PermissionNeeded as error:
            self.scheduler.note(f"{type(error).__name__}: {error.message}")
        except StatemgrError as error:
            explain(self, config, error)

    def _rot(self, machine: str, number: int) -> None:
        """One bit of a file on a machine on which nobody lives is wrong from now on."""
        root = self._directory / machine
        if any(owner.thread.is_alive() and owner.process.machine == machine for owner in self._owners):
            return
        # RocksDB, in which commands build states, draws names and sizes of its own
        of_commands = {"rescale", "tmp"}
        files = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)
        files = [path for path in files if of_commands.isdisjoint(path.relative_to(root).parts)]
        if not files:
            return
        path = files[self.scheduler.decide(f"which file rots before {number}", len(files))]
        times, content = path.stat(), bytearray(path.read_bytes())
        content[self.scheduler.decide(f"byte before {number}", len(content))] ^= 1 << number % 8
        with path.open("r+b") as file:
            file.write(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        kind = path.parent.parent.name if path.parent.parent.name in ("committed", "live", "staging") else path.name
        self.network.happened("rotten file", f"a bit of a file of {machine} is wrong: {kind}")

    def _lose(self, moment: str) -> None:
        """Something is lost of one backend, while the other one has the whole state."""
        scheduler = self.scheduler
        kind = _LOSSES[scheduler.decide("what is lost", len(_LOSSES))]
        if kind in ("blob", "bit"):
            names = sorted(name for name in self.bucket.names() if name.startswith(f"{self._name}/"))
            if names:
                name = names[scheduler.decide(f"which blob is lost {moment}", len(names))]
                self.bucket.lose(name) if kind == "blob" else self.bucket.spoil(name, moment)
            return
        store = STORES[scheduler.decide(f"which changelog is lost {moment}", 2)]
        topic = self.config("", 0).stores[store].changelog_topic
        if topic not in self.broker.topics:
            return
        if kind == "records":
            end = self.broker.end(topic, 0, only_settled=True)
            offset = scheduler.decide(f"where it begins {moment}", end + 1)
            self.broker.log(topic, 0).delete_before(offset)
            self.network.happened("cut changelog", f"somebody deletes the records of {topic} before {offset}")
        elif kind == "tail":
            self._lose_tail(topic, moment)
        elif kind == "topic":
            self.broker.delete(topic)
            self.network.happened("deleted changelog", f"somebody deletes {topic}")

    def _delete_made_topics(self) -> None:
        """Somebody deletes changelogs that the broker has made for a record of an owner that lived on without one, and
        empty ones of a rescale that another one has overtaken."""
        config = self.config("", 0)
        for store in STORES:
            topic = config.stores[store].changelog_topic
            if (found := self.broker.topics.get(topic)) is None:
                continue
            is_left = len(found.logs) != config.tasks and not any(log.entries for log in found.logs)
            if is_left or found.settings["cleanup.policy"] != "compact":
                self.broker.delete(topic)
                self.network.happened("deleted changelog", f"somebody deletes {topic}, which no owner has made")

    def _lose_tail(self, topic: str, moment: str) -> None:
        """A changelog loses its newest transactions, and perhaps aborted records take their offsets at once.

        While an owner lives, they do not take exactly these offsets: nobody but the owner has a transaction there.
        """
        transactions = 1 + self.scheduler.decide(f"how much is lost {moment}", 3)
        if self.scheduler.decide(f"others take the offsets {moment}", 2):
            lives = any(owner.thread.is_alive() for owner in self._owners)
            self.broker.lose_hidden_tail(topic, transactions, longer=lives)
        else:
            self.broker.lose_tail(topic, transactions)

    @property
    def has_member(self) -> bool:
        """Whether a member of the consumer group lives, which may be between two lives."""
        return any(owner.kind is LoopMember and owner.thread.is_alive() for owner in self._owners)

    def take_step(self, stores: Sequence[str], stage: Stage) -> None:
        """An operator changes the configuration file. Who lives goes on with the older configuration."""
        self.stages |= dict.fromkeys(stores, stage)
        self._outdated = [owner.config for owner in self._owners if owner.thread.is_alive()]

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
    def _loses(self) -> bool:
        """Whether both backends always have the state, so that one of them may lose something."""
        has_both = not self.stages and self.scheduler.decide("backends", 3) == 2
        return has_both and not self.loses_checkpoints and not self._adopts

    @property
    def _plugs_in(self) -> bool:
        """Whether some owners feed a backend of another package, too."""
        return not self.stages and self.scheduler.decide("plugs in", 6) == 0

    @property
    def _adopts(self) -> bool:
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
    def _has_owners_of_all(self) -> bool:
        """Whether an owner of a task works on all of them, which share blobs."""
        return self.tasks > 1 and self.scheduler.decide("owner of all", 3) == 0

    @property
    def keeps_managers(self) -> bool:
        """Whether a process that opens a task again does so with the same manager."""
        return self.loses_checkpoints and self.scheduler.decide("keeps managers", 2) == 0

    @property
    def _jumps(self) -> bool:
        """Whether an owner may have another backend than the one before it, and none of it."""
        stays = self.stages or self._loses or self.loses_checkpoints
        return not stays and self.scheduler.decide("jumps", 3) == 0

    def jumps_to_blobs(self, number: int) -> bool:
        """Whether the owner of this number has changelogs alone, and the next one blobs alone."""
        stores = (self.config("", of).stores[STORES[0]] for of in (number, number + 1)) if self._jumps else ()
        return [store.backup_factories for store in stores] == [BACKENDS[1:], BACKENDS[:1]]

    @property
    def _lost_blobs(self) -> bool:
        return "lost blob" in self.seen or "damaged blob" in self.seen

    def _stop(self, process: Process) -> None:
        """SIGTERM: a loop ends after its current message."""
        if process.alive and process.name in self.loops:
            self.loops[process.name].stop()

    def _wait(self, thread: Thread, seconds: float) -> None:
        until = self.scheduler.now + seconds
        while thread.is_alive() and self.scheduler.now < until:
            thread.join(min(2.0, until - self.scheduler.now))
            if not self.over and self.has_member:
                for _, model in self.parts:
                    end = self.end(model.source)
                    named = f"input after {end}" if model.source == SOURCE else f"input of {model.source} after {end}"
                    self.feed(end + self.scheduler.decide(named, 6), model.source)
            self._look_after_servers()

    def _look_after_servers(self) -> None:
        self.broker.look()
        self.broker.let_neighbour_write(self._topic, _NEIGHBOUR, goes_on=not self.over)
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
        if self._plugs_in:
            backup = [*backup, _PLUG_IN] if decide(f"plug-in at {number}", 3) else backup
            restore = [_PLUG_IN, *restore]
        mapping: dict[str, object] = {
            "job.name": self._name,
            "kafka.bootstrap.servers": f"memory:{self._name}",
            "blob.store.uri": f"memory://{self._name}",
            "state.dir": str(self._directory / machine),
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

    # --- peace ---------------------------------------------------------------------------------------------------

    def _peace(self) -> None:
        """Without faults, everything works, and everything is as it should be."""
        scheduler = self.scheduler
        scheduler.sleep(1000.0)
        self._look_after_servers()
        backends = [*BACKENDS, *([_PLUG_IN] if self._plugs_in else ())]
        both = {"task.backup.factories": backends}
        self._delete_made_topics()
        if self._loses and _LOSSES[scheduler.decide("what is lost", len(_LOSSES))] == "tail":
            topic = self.config("", 0).stores[STORES[scheduler.decide("which tail is lost", 2)]].changelog_topic
            if topic in self.broker.topics:
                self._lose_tail(topic, "at peace")
        if self.loses_checkpoints and scheduler.decide("checkpoints are lost at peace", 2):
            self._lose_checkpoints("at peace")
        if self.operators.goes_back_at_peace():
            self._in_process("undo", "machine-0", partial(self.operators.go_back, "undo"))
            self._in_process("settle", "machine-0", partial(self.operators.settle, "settle"))
        self._in_process("last owner", "machine-0", self._end_well, both)
        self._check_disk("machine-0")
        self._in_each_copy(self.operators.compare_copy)  # an opening ends the clean-up of a copy that died
        if "damaged blob" in self.seen:  # whoever reads it notices it, and the next commit stores everything again
            self._in_process(
                "reader of damage", "reader", self._end_well, {**both, "task.restore.factories": [*BACKENDS]}
            )
        at_once = scheduler.decide("older checkpoints at once", 2)
        if at_once:
            self._in_process("older checkpoints", "new", self._restore_retained, both)
        scheduler.sleep(31 * DAY_S)
        self._look_after_servers()
        self.broker.compact_all()
        for factory in backends:
            alone = {**both, "task.restore.factories": [factory]}
            self._in_process(f"restore from {factory}", f"new-{factory.partition(':')[0]}", self._reopen, alone)
        if self.model.was_rescaled:  # the first collection takes the old layout from the topic, the second its blobs
            self._in_process("gc of layouts", "machine-0", partial(self._collect, at_peace=False), both)
        self._in_process("gc", "machine-0", partial(self._collect, at_peace=True), both)
        if not at_once:
            self._in_process("older checkpoints", "new", self._restore_retained, both)
        self._in_each_copy(self.operators.compare_copy)
        self._in_each_copy(lambda config, copied: self._collect(config, at_peace=True))

    def _in_each_copy(self, work: Callable[[JobConfig, Mapping[str, tuple[Model, int]]], None]) -> None:
        """Do something with each copy of the job, which is given with what it has."""
        for made in self.operators.copies:
            of_copy = {
                key: value
                for key, value in made.config.to_mapping().items()
                if key in ("job.name", "job.tasks", "task.inputs") or key.endswith(_OF_COPY)
            }

            def look(config: JobConfig, copied: Mapping[str, tuple[Model, int]] = made.copied) -> None:
                work(config, copied)

            self._in_process(made.config.job_name, "new", look, of_copy)

    def _in_process(
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
            self._wait(thread, left_s)
            counted_s, left_s = process.paused_s, process.paused_s - counted_s
        if thread.is_alive():
            raise Wrong(f"{process.name} did not end within {PATIENCE_S:.0f} s")

    def _end_well(self, config: JobConfig) -> None:
        for part in self.parts:
            with StateManager(config, services=self.services) as manager:
                LastOwner(self, manager, "last owner", [part]).run()
        if not self.operators.parts:
            commit_at = self.model.acked if self._has_owners_of_all else None
            self.operators.compare_others(config, commit_at=commit_at)

    def _reopen(self, config: JobConfig) -> None:
        for name, model in self.parts:
            acked = model.acked
            with StateManager(config, services=self.services) as manager, manager.open_task(name) as task:
                if model.compare(task.last_checkpoint, task, acked) != acked:
                    raise Wrong("the last commit is not the current one")
        if self._has_owners_of_all:
            self.operators.compare_others(config)

    def _restore_retained(self, config: JobConfig) -> None:
        """Restore every retained checkpoint."""
        for part in self.parts:
            self._restore_retained_of(config, *part)

    def _restore_retained_of(self, config: JobConfig, task: str, model: Model) -> None:
        with closing(self.services(config)) as services, closing(CheckpointTopic(config, services.clock)) as log:
            checkpoints = log.read()[task].checkpoints
            ids = [str(one.checkpoint_id) for one in checkpoints]
            retention = Retention(newest=config.retained, hourly=config.retained_hourly, daily=config.retained_daily)
            stay = retention.stay([one.checkpoint_id.millis for one in checkpoints])
            if more := [one for at, one in enumerate(ids) if at not in stay and one not in checkpoints[0].kept]:
                raise Wrong(f"checkpoints are retained that nothing asks for: {more}")
            if len(ids) < min(config.retained, model.acks):
                raise Wrong(f"{len(ids)} checkpoints are retained, not {config.retained}")
            if lost := model.kept - {*ids}:
                raise Wrong(f"kept checkpoints are not there: {sorted(lost)}")
            for number, checkpoint in enumerate(checkpoints):
                older, newer = checkpoints[number + 1 :], checkpoints[:number][::-1]
                try:
                    stores, _ = restore_task(services, task, checkpoint, older=older, newer=newer)
                except (MissingState, CorruptError):
                    if not self._lost_blobs and all(checkpoint.marker(BACKENDS[0], store) for store in STORES):
                        raise
                    continue  # compaction may have changed what an older checkpoint needs
                found: State = {name: dict(store.entries.scan(None, None)) for name, store in stores.items()}
                for store in stores.values():
                    store.close()
                model.compare_state(model.position(checkpoint), found)

    def _check_topic(self, log: CheckpointTopic) -> None:
        """Of checkpoints, the topic has the retained ones alone. The next driver deletes what is left of the job."""
        records = log.read()
        retained = {(task, one.sequence) for task, record in records.items() for one in record.checkpoints}
        generations = {record.layout.generation for record in records.values()}
        keys = [codecs.decode_key(key) for generation in generations for key in log.record_keys(generation)]
        if extra := {(key.task, key.sequence) for key in keys if key.task} - retained:
            raise Wrong(f"the topic has records of checkpoints that are not retained: {sorted(extra)}")

    def _check_disk(self, machine: str) -> None:
        """A machine on which the job was closed has the newest state of each store, perhaps another one of which a
        snapshot is being made, and nothing of processes that died."""
        job = self._directory / machine / self._name / "1"
        for task, _ in self.parts:
            for store in STORES:
                root = job / task.replace(" ", "_") / store
                states = [path for path in (root / "committed").iterdir() if path.is_dir()]
                left = [path.name for part in ("live", "staging", "owners") for path in (root / part).iterdir()]
                if len(states) > 2 or left:
                    raise Wrong(f"{machine} has {len(states)} states of {store} of {task}, and is left with {left}")

    def _collect(self, config: JobConfig, *, at_peace: bool) -> None:
        with closing(self.services(config)) as services, closing(CheckpointTopic(config, services.clock)) as log:
            try:
                report = collect_garbage(services, log, no_progress, delete=True)
            except StatemgrError as error:
                if isinstance(error, MissingBlob | CorruptError) and self._lost_blobs:
                    return  # nobody knows what the checkpoint needs that has lost its index
                if at_peace or not isinstance(error, MissingState | PermissionNeeded):
                    self.model.expect(error)
                if at_peace:
                    raise
                return
            self.scheduler.note(f"gc deletes {report.deleted.blobs} blobs")
            missing = [*report.missing, *(layout.lost for layout in report.layouts if layout.lost)]
            if (not self._lost_blobs and missing) or (at_peace and (report.failed or report.expiring)):
                raise Wrong(f"gc: missing {missing}, failed {report.failed}, expiring {report.expiring}")
            if not at_peace or any(layout.lost for layout in report.layouts):
                return
            self._check_topic(log)
            needed = set(find_needed_blobs(services, log, allow_no_checkpoints=False).needed)
            # the next owner of such a task removes their TTLs, or deletes them
            expiring = {one.blob_id for record in log.read().values() for one in record.current.outstanding_ttl}
        prefix = f"{config.job_name}/{config.job_id}/"
        left = {name for name in self.bucket.names() if name.startswith(prefix) and name not in expiring - needed}
        if left - needed or needed - left - self.bucket.lost:  # a kept checkpoint may need what was lost
            raise Wrong(
                f"after gc: {len(left - needed)} blobs too many {sorted(left - needed)[:3]}, "
                f"missing {sorted(needed - left)[:3]}"
            )
