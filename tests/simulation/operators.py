"""Operators: people who give commands about a job while its owners live.

Each command runs the real code in a process of its own, which may die at any step. A command that has failed is
repeated, and sometimes two people give it at the same time. What it returns is compared with the model at once; what it
leaves behind, whoever opens the job next finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException

from statemgr import JobConfig, StateManager
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.engine.coordinator import LOOK_S
from statemgr.errors import (
    CorruptError,
    InvalidError,
    LayoutMismatch,
    MissingError,
    MissingState,
    StatemgrError,
)
from statemgr.flows.opening.open_job import JobTopics
from statemgr.flows.owner import Owner as JobOwner
from statemgr.health.stages import positions
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.jobs.stages import Stage, changed_keys, published_together, step_back, step_forward
from statemgr.operations.adopt.adopt import adopt
from statemgr.operations.adopt.found import Request
from statemgr.operations.adopt.old_topics import OldTopics
from statemgr.operations.adopt.origins import ORIGINS
from statemgr.operations.copy.copy import copy
from statemgr.operations.copy.look import look
from statemgr.operations.materialize.materialize import materialize_store, stores_of
from statemgr.operations.migrate.preconditions import check, check_again
from statemgr.operations.migrate.rebuild import rebuild
from statemgr.operations.migrate.verify import StoreToVerify, Verifier
from statemgr.operations.rescale.plan import changes_in_force, plan_rescale
from statemgr.operations.rescale.rescale import Workers, rescale
from statemgr.operations.rescale.undo import undo
from statemgr.operations.rollback.owner import Goal, keep, roll_back
from statemgr.operations.standby.process import Standby
from statemgr.ports import no_progress
from statemgr.reader import JobReader
from statemgr.services import Services
from statemgr.testing.memory_kafka import Group
from tests.simulation.model import SOURCE, STORES, TASK, TOPIC, Model, State, Wrong, input_topic, is_in
from tests.simulation.owners import Levelling
from tests.simulation.threads import Thread
from tests.simulation.turns import Process

if TYPE_CHECKING:
    from tests.simulation.history import History

#: Gets a name of the moment, for decisions, and the configuration.
Command = Callable[[str, JobConfig], None]
#: Why a command finds nothing to do: the job has not begun, or has moved on meanwhile.
_TOO_LATE = (
    "the checkpoint topic does not exist",
    "the job has no checkpoint",
    "is not retained",
    "no checkpoint of",
    "tasks already",  # somebody else has rescaled it
    "cannot go back alone",
    "retains several of these checkpoints",
    "an exact rewind is impossible",  # compaction may have changed what an older checkpoint needs
    "is to be the new changelog, and has",  # one for another number of tasks, which nobody deletes here
    "that were written for",  # owners have read on in a partition that goes away
)
#: What another rescale, which was given on another machine, does to the new changelogs: it writes them, or deletes them
#: to make them itself.
_OF_ANOTHER_RESCALE = (
    "has records that no rescale on this machine wrote",
    "does not exist",
    "partitions instead of",
)
#: The partitioner of the input's producers, which the state of a single task does not show.
_PARTITIONER = "murmur2"
#: The numbers of tasks that rescales give a job, each of them once: an owner that was suspended for long may come back
#: with the configuration of an older layout.
_LAYOUTS = (2, 4)
#: The end of the name of a machine on which somebody else gives the same command with another number of tasks.
_ELSEWHERE = " of somebody else"
#: Seconds after a rescale until garbage collection may collect the old layout: half a grace period.
_COLLECTED_S = 12 * 3600.0
_OLD_JOB = "old"
_OLD_CHANGELOGS = {store: f"{_OLD_JOB}-{store}" for store in STORES}
#: Runs of an adoption that may die before it has succeeded.
_RUNS = 30


def _changelogs(config: JobConfig) -> set[str]:
    """The stores that have a changelog."""
    return {
        name
        for name, store in config.stores.items()
        if KAFKA_CHANGELOG in (*store.backup_factories, *store.restore_factories)
    }


@dataclass(frozen=True)
class Copy:
    """A copy that was made of the job: its configuration, and task → the model and the position of the copied state."""

    config: JobConfig
    copied: Mapping[str, tuple[Model, int]]


class Operators:
    """Gives commands."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._scheduler, self._model = history.scheduler, history.model
        self.copies: list[Copy] = []
        #: whether the job of other software is adopted; None if there is none
        self.adopted: bool | None = None
        #: whether a command has reported that it did this itself
        self._was_adopted_by_one = False
        #: number of tasks → the models of each layout that the job has had; none of the first one
        self._layouts: dict[int, list[Model]] = {1: []}
        #: the layouts that can be brought back for sure → when they were replaced, the newest one last
        self._replaced: dict[int, float] = {}
        #: whether nothing stops an undo, and the layout to which somebody goes back
        self._may_undo, self._target = False, 0
        #: whether the last rescale has begun with the layout in which owners work
        self._is_next = False
        #: the stores whose changelogs a rescale may have begun to write, and died
        self._begun_changelogs = set[str]()
        #: the rescale commands that were given: their numbers and machines
        self._rescales = set[tuple[str, str]]()
        #: the numbers of tasks that rescales have made
        self._used = set[int]()
        #: the models of the tasks of the rescale that is in force, and configuration keys with their new values
        self.parts: list[Model] = []
        self.layout: Mapping[str, object] = {}

    def begin_with_an_old_job(self) -> None:
        """Other software has run the job: there are its changelogs, and the offset of its group. Adopt it."""
        history, broker, position = self._history, self._history.broker, 5 + self._scheduler.decide("old job", 20)
        history.feed(position)
        broker.groups[_OLD_JOB] = Group(offsets={(TOPIC, 0): position})
        for topic in _OLD_CHANGELOGS.values():
            broker.create(topic, 1, {"cleanup.policy": "compact"})
        for number in range(position):
            store, key, value = self._model.change(number)
            broker.append(_OLD_CHANGELOGS[store], 0, key, value)
        self._old_ends = self._ends()
        self._model.begin_at(position)
        self.adopted = False
        for run in range(_RUNS):
            if not self.adopted:
                self._give(f"adopt-{run}", f"machine-{run % 2}", 0, self._adopt)
        if not self.adopted:
            raise Wrong(f"{_RUNS} runs of adopt have failed")

    def _ends(self) -> list[int]:
        return [self._history.broker.end(topic, 0, only_settled=False) for topic in _OLD_CHANGELOGS.values()]

    def act(self, number: int) -> None:
        """Give one command, or none."""
        scheduler, history = self._scheduler, self._history
        if history.stages and scheduler.chance(f"step after {number}", 0.6):
            self._give(f"migrate-{number}", "operator", number, self._migrate)
        if self.adopted and scheduler.chance(f"adopts again after {number}", 0.1):
            self._give(f"adopt again-{number}", "operator", number, self._adopt)
        if history.jumps_to_blobs(number) and scheduler.chance(f"materialize before {number + 1}", 0.8):
            self._give(f"materialize ahead-{number}", "operator", number + 1, self._materialize_ahead)
        commands: dict[str, Command] = {
            "materialize": self._materialize, "read": self._read, "standby": self._follow, "verify": self._verify,
        }  # fmt: skip
        # an owner that writes changelogs again would be asked for permission to overwrite what such a rescale has left
        may_rescale = self._begun_changelogs <= _changelogs(history.config("", number))
        may_rescale = may_rescale and len(self._used) < len(_LAYOUTS)
        if self.parts:  # owners work in the new layout
            commands |= {"rollback": self._go_back, "keep": self._keep, "copy": self._copy}
            if self._scheduler.chance(f"old file after {number}", 0.25):
                self._give(f"old rollback-{number}", "operator", number, self._go_back_with_an_old_file)
            if may_rescale and scheduler.chance(f"rescale again after {number}", 0.5):
                commands = {"rescale": self._rescale}
            if "rescale" in commands or scheduler.chance(f"command in the new layout after {number}", 0.5):
                self._choose(commands, number)
            self._undo(number, f"machine-{number % 2}")
            return
        may_rescale = may_rescale and history.tasks == 1
        may_rescale = may_rescale and not history.loses_checkpoints
        if not history.loses_checkpoints:  # what these leave on the topic must stay
            commands["copy"] = self._copy
        if history.tasks == 1:
            commands["rollback"] = self._go_back
            if not history.loses_checkpoints:
                commands["keep"] = self._keep
            if may_rescale:
                commands["rescale"] = self._rescale
        if may_rescale and scheduler.chance(f"rescale after {number}", 0.3 if self._races else 0.04):
            commands = {"rescale": self._rescale}
        elif not scheduler.chance(f"command after {number}", 0.35):
            return
        self._choose(commands, number)
        self._undo(number, f"machine-{number % 2}")

    @property
    def _races(self) -> bool:
        """Whether two people, on two machines, rescale the job to different numbers of tasks at the same time."""
        return self._scheduler.decide("two people rescale", 12) == 0

    def _choose(self, commands: Mapping[str, Command], number: int) -> None:
        """Give one of the commands."""
        decide = self._scheduler.decide
        kind = [*commands][decide(f"kind of command after {number}", len(commands))]
        machine = f"machine-{decide(f'machine of command {number}', 3)}"
        self._give(f"{kind}-{number}", machine, number, commands[kind], on_two_machines=kind == "rescale")
        if kind == "rescale" and self._model.was_rescaled:
            self._know_the_layout(f"settle-{number}", machine, number)

    def _know_the_layout(self, name: str, machine: str, number: int) -> None:
        """After a rescale or an undo, it goes on when the outcome is known for sure."""
        for run in range(_RUNS):
            if self._give(f"{name}-{run}", machine, number, self.settle):
                return
        raise Wrong(f"nobody could take the job in {_RUNS} runs")

    def let_collect(self) -> None:
        """Garbage is about to be collected. After a day, this ends the way back."""
        now = self._scheduler.now
        self._replaced = {tasks: at for tasks, at in self._replaced.items() if now - at < _COLLECTED_S}

    def goes_back_at_peace(self) -> bool:
        """Whether somebody takes the last rescale back in the end."""
        return self._scheduler.decide("stays rescaled", 2) == 0 and self._goes_back("at peace")

    def _goes_back(self, moment: str) -> bool:
        """Whether somebody may go back now, to the layout before, or further."""
        if not self._may_undo or not self._replaced:
            return False
        layouts = [*self._replaced]
        is_further = self._scheduler.decide(f"further back {moment}", 3) == 0
        self._target = layouts[0 if is_further else -1]
        return True

    def _undo(self, number: int, machine: str) -> None:
        """Go back from a rescale, and perhaps once more: to the layout before that, or to the one that was left."""
        scheduler = self._scheduler
        if not scheduler.chance(f"undo after {number}", 0.3):
            return
        tries = 3
        while tries and self._goes_back(f"{number}-{tries}"):
            before = self.parts
            self._give(f"undo-{number}-{tries}", machine, number, self.go_back)
            self._know_the_layout(f"settle undo-{number}-{tries}", machine, number)
            tries -= 1
            if self.parts is not before and not scheduler.chance(f"undo again after {number}-{tries}", 0.4):
                return

    def _give(self, name: str, machine: str, number: int, work: Command, *, on_two_machines: bool = False) -> bool:
        """Give a command until it ends well, up to three times, and sometimes twice at once. Returns: whether it
        has ended well."""
        scheduler, history = self._scheduler, self._history
        for attempt in range(3):
            ended = list[str]()
            threads: list[tuple[Process, Thread]] = []
            races = on_two_machines and self._races
            for twin in range(1 + (races or scheduler.decide(f"twice {name}", 2 if on_two_machines else 5) == 0)):
                moment = f"{name}-{attempt}{'-twin' * twin}"
                is_elsewhere = twin and (races or (on_two_machines and scheduler.decide(f"elsewhere {moment}", 2)))
                place = machine + _ELSEWHERE if is_elsewhere else machine
                process = Process(moment, place)

                give = partial(self._work, work, moment, history.config(place, number), ended)
                scheduler.note(f"{moment} begins")
                threads.append((process, scheduler.start(moment, process, give)))
            for process, thread in threads:
                history.wait_for(thread, process)
                scheduler.kill(process)
            if ended:
                return True
        return False

    def _work(self, work: Command, moment: str, config: JobConfig, ended: list[str]) -> None:
        """Do it, and note that it ended well. A command may fail, as the situation explains."""
        try:
            work(moment, config)
            ended.append(moment)
        except StatemgrError as error:
            self._scheduler.note(f"{type(error).__name__}: {error.message}")
            if isinstance(error, MissingState | InvalidError) and any(reason in error.message for reason in _TOO_LATE):
                return
            if isinstance(error, LayoutMismatch) and self._model.was_rescaled:
                return
            # a checkpoint from before the last steps of a migration, which the present backend has never had
            is_from_before = moment.startswith("rollback") and self._history.stages
            if is_from_before and isinstance(error, MissingState) and "has no marker of it" in error.message:
                return
            several = len(self._rescales) > 1  # or the disk of the machine is lost
            if several and any(reason in error.message for reason in _OF_ANOTHER_RESCALE):
                return
            self._history.expect(error, config)

    @contextmanager
    def _opened(self, config: JobConfig, *, owned: bool = False) -> Iterator[tuple[Services, CheckpointTopic]]:
        with (
            closing(self._history.services(config)) as services,
            closing(CheckpointTopic(config, services.clock, owned=owned)) as log,
        ):
            yield services, log

    # --- commands that fence nobody ------------------------------------------------------------------------------

    def _materialize_ahead(self, moment: str, config: JobConfig) -> None:
        """Offer snapshots of all stores or of one to the next owner."""
        wanted = (STORES, STORES[:1], STORES[1:])[self._scheduler.decide(f"stores of {moment}", 3)]
        self._materialize(moment, config, wanted)

    def _materialize(self, moment: str, config: JobConfig, wanted: Sequence[str] = STORES) -> None:
        """Build first snapshots from changelogs, and offer them."""
        if config.snapshot_interval.is_every_commit:
            return
        with self._opened(config) as (services, log):
            records = log.read()
            for task, store in stores_of(services, records):
                if store in wanted and records[task].current.marker("kafka-changelog", store):
                    try:
                        made = materialize_store(services, log, task, store, no_progress)
                    except MissingState:
                        if log.read()[task].current.marker("kafka-changelog", store):
                            raise
                        continue  # an owner has committed without a changelog meanwhile
                    self._scheduler.note(f"{task} {store}: {'offered' if made.offered else made.reason}")

    def _read(self, moment: str, config: JobConfig) -> None:
        """Read what is published, as an application of somebody else does."""
        with JobReader(config, services=self._history.services) as reader:
            for task, model in self._history.parts:
                record = reader.records().get(task)
                if record is None:
                    return
                checkpoint, found = record.current, dict[str, dict[bytes, bytes]]()
                try:
                    for store in STORES:
                        found[store] = dict(chain.from_iterable(reader.scan(record, checkpoint, store)))
                except (MissingError, CorruptError):
                    if reader.records()[task].current == checkpoint:
                        raise
                    return  # the job has moved on meanwhile
                model.compare_state(model.position(checkpoint), found, as_of_now=False)

    def _follow(self, moment: str, config: JobConfig) -> None:
        """Follow the job for a while, so that a task can open here without a restore."""
        with Standby(config, (), services=self._history.services) as standby:
            for turn in range(3):
                for followed in standby.once():
                    if followed.error is not None:
                        self._scheduler.note(f"standby: {followed.error}")
                        if not isinstance(followed.error, MissingError | CorruptError):  # the job may have moved on
                            self._model.expect(followed.error)
                self._scheduler.sleep(1.0 + self._scheduler.decide(f"rest {moment} {turn}", 10))

    def _verify(self, moment: str, config: JobConfig) -> None:
        """Compare what the backends have."""
        with self._opened(config) as (services, log), self._workers(config) as workers:
            verifier = Verifier(services, workers.submit, no_progress, processes=2, differences=3)
            for record in log.read().values():
                for store in record.current.stores:
                    markers = record.current.state_checkpoint_markers
                    factories = tuple(sorted(name for name, has in markers.items() if store in has))
                    if len(factories) < 2:
                        continue
                    try:
                        verified = verifier.verify(StoreToVerify(record, record.current, store, factories))
                    except (MissingError, CorruptError):
                        if log.read()[record.task].current == record.current:
                            raise
                        continue  # the job has dropped it meanwhile
                    self._scheduler.note(f"{record.task} {store}: {'equal' if verified.equal else 'not equal'}")
                    if not verified.equal and verified.problem is None:
                        raise Wrong(f"the backends differ: {verified.differences}")

    def _migrate(self, moment: str, config: JobConfig) -> None:
        """Move the configuration of all stores, or of one, a stage further or back."""
        history, decide = self._history, self._scheduler.decide
        stores = ((), (), STORES[:1], STORES[1:])[decide(f"stores of {moment}", 4)]
        forward, before = decide(f"direction of {moment}", 3) > 0, dict(history.stages)
        with (
            self._opened(config) as (services, _),
            JobReader(config, only_settled=True, services=history.services) as reader,
        ):
            records = reader.retaining()
            found = positions(services, records, stores)
            if not (known := [one for one in found if one.stage is not None]):
                return
            step = step_forward(known) if forward else step_back(known)
            if step is None or step.written:
                return
            conditions, _ = check(services, reader, step, found, records, 1, no_progress)
        if unmet := [one for one in conditions if not one.met]:
            self._scheduler.note(f"no step to stage {step.target}: {unmet[0].name}: {unmet[0].detail}")
            return
        if forward and any((one.configured or 0) < (one.stage or 0) for one in known):
            raise Wrong("a step forward from a stage that the configuration has left")
        if step.stage is Stage.BLOBS and not forward:
            changes = changed_keys(step, dict.fromkeys(STORES, True), stores)
            later = JobConfig.from_mapping(config.to_mapping(), changes)
            rebuild(later, records, published_together(records), no_progress, history.services)
        else:
            check_again(config, step, stores, history.services)
        if history.stages == before:  # the file has not changed meanwhile
            history.take_step(stores or STORES, step.target)
            self._replaced = {}  # their checkpoints are of the stage before
            self._scheduler.note(f"{' and '.join(stores or STORES)} from stage {step.stage} to {step.target}")

    def _copy(self, moment: str, config: JobConfig) -> None:
        """Clone the job into a new one."""
        name = f"{config.job_name}-{moment}"
        # those of a layout that a rescale has made are in the file
        topics = {f"stores.{store}.changelog.topic": f"{name}-{store}" for store in STORES} if self.parts else {}
        target_config = JobConfig.from_mapping(config.to_mapping(), {"job.name": name, **topics})
        parts = dict(self._history.parts)
        with (
            closing(self._history.services(config)) as source,
            self._opened(target_config, owned=True) as (target, log),
            JobReader(config, services=self._history.services) as reader,
        ):
            try:
                records = reader.records()
                tasks = look(source, target, records, log, ())
                if TASK not in records:
                    return  # only another task has committed so far
                of_task = {one.record.task: one.checkpoint for one in tasks}
                positions = {task: (model, model.position(of_task[task])) for task, model in parts.items()}
                copied = copy(source, target, log, tasks, no_progress)
            except (MissingError, CorruptError) as error:
                self._scheduler.note(f"{type(error).__name__}: {error.message}")
                return  # the job may have dropped the checkpoint meanwhile
        self._scheduler.note(f"copied {[at for _, at in positions.values()]} to {name}")
        if len(copied.checkpoints) != len(tasks):
            raise Wrong(f"a copy of {len(tasks)} tasks has published {len(copied.checkpoints)}")
        self.copies.append(Copy(target_config, positions))

    def compare_copy(self, config: JobConfig, copied: Mapping[str, tuple[Model, int]]) -> None:
        """A copy has what it had at first. The first opening of each task ends the copy's clean-up."""
        for name, (model, position) in copied.items():
            with StateManager(config, services=self._history.services) as manager, manager.open_task(name) as task:
                checkpoint = task.last_checkpoint
                if checkpoint is None or model.position(checkpoint) != position:
                    raise Wrong(f"the copy at {position} opened at {checkpoint and checkpoint.input_offsets}")
                model.compare_state(position, {store: dict(task.store(store).range()) for store in STORES})
        if len(copied) < config.tasks:
            self.compare_others(config)

    def compare_others(self, config: JobConfig, *, commit_at: int | None = None) -> None:
        """The tasks after the first one have what they had. ``commit_at``: a position at which they commit then."""
        for number in range(1, config.tasks):
            with (
                StateManager(config, services=self._history.services) as manager,
                manager.open_task(task_name(number)) as task,
            ):
                self._model.compare_other(task.last_checkpoint, task)
                if commit_at is not None:
                    if self._model.was_damaged():
                        self._scheduler.sleep(3 * LOOK_S)  # backups that have lost something are made again
                    task.store(STORES[0]).put(b"at", self._model.padded(commit_at))
                    task.commit({SOURCE: commit_at})

    # --- commands that fence -------------------------------------------------------------------------------------

    def _go_back(self, moment: str, config: JobConfig) -> None:
        """Make an older checkpoint current again, for all tasks or for one."""
        decide, parts = self._scheduler.decide, dict(self._history.parts)
        alone = [*parts][decide(f"task of {moment}", len(parts))] if decide(f"alone {moment}", len(parts)) else None
        with self._opened(config, owned=True) as (services, log):
            records = log.read()
            chosen: dict[str, Checkpoint] = {}
            for task in [alone] if alone else parts:
                if task not in records:
                    return
                checkpoints = records[task].checkpoints
                chosen[task] = checkpoints[decide(f"checkpoint of {moment} for {task}", len(checkpoints))]
            targets = {task: parts[task].position(checkpoint) for task, checkpoint in chosen.items()}
            self._scheduler.note(f"rollback to {targets}")
            for task, target in targets.items():
                parts[task].tried[target] += 1
                parts[task].going_back.append(target)
            goal = Goal(tuple(str(checkpoint.checkpoint_id) for checkpoint in chosen.values()), alone)
            _, published = roll_back(services, log, JobTopics(services), goal)
            for task, target in targets.items():
                parts[task].went_back(published[task])
                parts[task].going_back.remove(target)
            self._scheduler.note(f"rolled back to {targets}")

    def _go_back_with_an_old_file(self, moment: str, config: JobConfig) -> None:
        """Somebody with the configuration from before a rescale makes an older checkpoint current again."""
        old = self._history.config(config.state_dir.name, 0, **{"job.name": config.job_name})
        with self._opened(old, owned=True) as (services, log), suppress(LayoutMismatch):
            oldest = log.read()[TASK].checkpoints[-1]
            roll_back(services, log, JobTopics(services), Goal((str(oldest.checkpoint_id),), None))
            raise Wrong(f"one of {len(self.parts)} tasks has gone back")

    def _keep(self, moment: str, config: JobConfig) -> None:
        """Keep a checkpoint beyond the retention, or the ones that are kept no longer."""
        parts = self._history.parts
        task, model = parts[self._scheduler.decide(f"task of {moment}", len(parts))]
        with self._opened(config, owned=True) as (services, log):
            record = log.read().get(task)
            if record is None:
                return
            kept = record.current.kept
            if len(kept) > 1 or (kept and self._scheduler.decide(f"no longer {moment}", 2)):
                wanted, is_kept = kept[0], False
            else:
                chosen = record.checkpoints[self._scheduler.decide(f"checkpoint of {moment}", len(record.checkpoints))]
                wanted, is_kept = str(chosen.checkpoint_id), True
            # tasks whose checkpoints were published together have one with the same ID
            for _, part in parts:
                part.kept.discard(wanted)
            keep(services, log, JobTopics(services), wanted, is_kept=is_kept)
            for _, part in parts:  # somebody may have kept it meanwhile
                part.kept.discard(wanted)
            if is_kept:
                model.kept.add(wanted)
            self._scheduler.note(f"{'keeps' if is_kept else 'keeps no longer'} {wanted}")

    def _adopt(self, moment: str, config: JobConfig) -> None:
        """Adopt the job of other software, which is done once."""
        factories = {f"task.{kind}.factories": ["kafka-changelog"] for kind in ("backup", "restore")}
        config = JobConfig.from_mapping(config.to_mapping(), factories)
        request = Request(ORIGINS["raw"], _OLD_JOB, _OLD_CHANGELOGS, inputs=config.inputs, tasks=1, settle_s=1.0)
        was_adopted = self.adopted
        with self._opened(config, owned=True) as (services, log), OldTopics(config, services.clock) as old:
            found = adopt(services, log, old, request, in_place=False, progress=no_progress)
        self._scheduler.note("adopted" if found.old else "adopted already")
        if found.old:
            if was_adopted or self._was_adopted_by_one:
                raise Wrong("a job is adopted twice")
            self._was_adopted_by_one = True
        self.adopted = True
        if self._ends() != self._old_ends:
            raise Wrong("somebody has written to the changelogs of the old job")

    def _rescale(self, moment: str, config: JobConfig) -> None:
        """Give the job another number of tasks, and look at them."""
        history, model = self._history, self._model
        command, left = moment.split("-")[1], [tasks for tasks in _LAYOUTS if tasks not in self._used]
        elsewhere = config.state_dir.name.endswith(_ELSEWHERE)
        tasks = left[(self._scheduler.decide(f"tasks after {command}", len(left)) + elsewhere) % len(left)]
        self._rescales.add((command, config.state_dir.name))
        self._begun_changelogs |= _changelogs(config)
        with self._opened(config, owned=True) as (services, log), self._workers(config) as workers:
            if len(log.read()) == tasks:
                return
            self._read_what_is_left(moment, config, tasks)
            before = [part for _, part in history.parts]
            acked, records = [part.acked for part in before], log.read()
            wanted = self._older(moment, records)
            plan, is_known = plan_rescale(config, records, tasks, wanted), len(records) == len(before)
            if wanted is not None:
                acked = [part.position(plan.targets[task]) for task, part in history.parts]
            self._is_next, model.was_rescaled = is_known, True
            self._may_undo = False  # what this leaves of the next changelogs stops an undo
            if history.adds_partitions and tasks > history.broker.partitions(TOPIC):
                history.broker.add_partitions(TOPIC, tasks)
            ends = self._ends_of(config.inputs)
            done = rescale(services, log, tasks, workers, no_progress, checkpoint_id=wanted, chosen=_PARTITIONER)
        self._scheduler.note(f"rescaled to {len(done.checkpoints)} tasks")
        found: State = {store: {} for store in STORES}
        offsets: dict[str, int] = {}
        for number in range(tasks):
            with (
                StateManager(plan.new_config, services=history.services) as manager,
                manager.open_task(task_name(number)) as task,
            ):
                for store in STORES:
                    mine = dict(task.store(store).range())
                    if mine.keys() & found[store].keys():
                        raise Wrong(f"two tasks have keys of {store}: {mine.keys() & found[store].keys()}")
                    found[store] |= mine
                assert task.last_checkpoint is not None
                mine_offsets = task.last_checkpoint.input_offsets
                if foreign := [source for source in mine_offsets if int(source.rpartition("-")[2]) % tasks != number]:
                    raise Wrong(f"{task.name} has the offsets of {foreign}")
                offsets |= mine_offsets
        for source, end in ends.items():
            number, topic = int(source.rpartition("-")[2]), source.rpartition("-")[0]
            for offset, row in history.broker.log(topic, number).records(end):
                if offset >= offsets.get(source, 0) and not is_in(row.key or b"", number, tasks):
                    raise Wrong(f"rescaled, and {source} has a row at {offset} with a key of another task")
        for part, at_least in zip(before, acked, strict=True):
            # one that was given at the same time may have gone back first
            is_older = is_known and part.at(offsets) < min(at_least, part.acked, *part.going_back)
            if is_older or (wanted is not None and part.at(offsets) != at_least):
                raise Wrong(f"rescaled at {offsets}, but {at_least} of {part.source} was acknowledged before")
            if part.tried[part.at(offsets)] < 1:
                raise Wrong(f"rescaled at {offsets}, and nobody has committed this of {part.source}")
        whole = model.part(0, 1, before, offsets)
        whole.compare_state(whole.acked, found, as_of_now=False)

    def _older(self, moment: str, records: Mapping[str, CheckpointRecord]) -> str | None:
        """The checkpoint that a rescale begins with; None for the current ones."""
        if len(records) != len(self._history.parts) or self._scheduler.decide(f"goes back first {moment}", 5):
            return None
        ids = [str(one.checkpoint_id) for one in next(iter(records.values())).checkpoints]
        return ids[self._scheduler.decide(f"checkpoint of {moment}", len(ids))]

    def _read_what_is_left(self, moment: str, config: JobConfig, tasks: int) -> None:
        """Before a rescale, read the partitions that go away to their ends, and all that get others beside them."""
        history = self._history
        is_careful = history.adds_partitions and self._scheduler.decide(f"reads what is left before {moment}", 4)
        for number, named in enumerate(history.parts):
            _, part = named
            if number >= tasks or (is_careful and history.end(part.source) > part.acked):
                with StateManager(config, services=history.services) as manager:
                    Levelling(history, manager, moment, [named]).run()

    def _ends_of(self, topics: Sequence[str]) -> Mapping[str, int]:
        """Where the partitions of topics end."""
        broker, end = self._history.broker, self._history.end
        sources = [f"{topic}-{number}" for topic in topics for number in range(broker.partitions(topic))]
        return {source: end(source) for source in sources}

    def settle(self, moment: str, config: JobConfig) -> None:
        """Fence everybody, and see which layout the job is in."""
        with (
            self._opened(config, owned=True) as (services, log),
            closing(JobOwner.take(services, log, tasks=max(_LAYOUTS))),
        ):
            records, retired = log.read(), log.retired()
        self._scheduler.note(f"in the layout with {len(records)} tasks")
        before, tasks, target = self.parts or [self._model], len(records), self._target
        self._target = 0
        if tasks == len(before):
            return
        if target:
            if tasks != target:
                raise Wrong(f"back in a layout with {tasks} tasks instead of {target}")
            del self._replaced[target]
            self._replaced[len(before)] = self._scheduler.now
            self._work_in(self._layouts[tasks], config, records)
            return
        offsets = dict(chain.from_iterable(record.current.input_offsets.items() for record in records.values()))
        is_known = self._is_next and bool(retired) and retired[-1].layout.tasks == len(before)
        self._used.add(tasks)
        topic = TOPIC if self._history.broker.partitions(TOPIC) == tasks else input_topic(tasks)
        with suppress(KafkaException):  # it is there
            self._history.broker.create(topic, tasks)
        made = [self._model.part(number, tasks, before, offsets, topic) for number in range(tasks)]
        if len(self.parts) != tasks:  # nobody else has seen it meanwhile
            self._replaced = {**self._replaced, len(before): self._scheduler.now} if is_known else {}
            self._may_undo, self._layouts[tasks] = True, made
            self._work_in(made, config, records)

    def _work_in(self, parts: list[Model], config: JobConfig, records: Mapping[str, CheckpointRecord]) -> None:
        """Let owners work in this layout, with the configuration that belongs to it."""
        inputs = {"task.inputs": [part.source.rpartition("-")[0] for part in parts[:1]]}
        self.parts, self.layout = parts, {**changes_in_force(config, records), **inputs} if parts else {}

    def go_back(self, moment: str, config: JobConfig) -> None:
        """Make an earlier layout current again: the one before, or that of one of its checkpoints."""
        with self._opened(config, owned=True) as (services, log):
            if len(log.read()) != max(len(self.parts), 1):
                return  # otherwise it would take the undo back
            wanted = None
            if self._target != [*self._replaced][-1]:
                there = (log.read(generation=one.layout.generation) for one in log.retired())
                records = next((found for found in there if len(found) == self._target), {})
                ids = [str(one.checkpoint_id) for record in records.values() for one in record.checkpoints]
                if not ids:
                    return  # the job has moved on meanwhile
                wanted = ids[self._scheduler.decide(f"checkpoint of {moment}", len(ids))]
            undo(services, log, self._history.services, no_progress, wanted)

    @contextmanager
    def _workers(self, config: JobConfig) -> Iterator[Workers]:
        """Two workers of a command, each with services of its own."""
        with self._history.executors().pool("workers", 2) as pool:

            def work(function: Callable[..., Any], *arguments: object) -> Any:
                with closing(self._history.services(config)) as services:
                    return function(services, *arguments)

            yield Workers(lambda function, *given: pool.submit(work, function, *given), 2, self._history.services)
