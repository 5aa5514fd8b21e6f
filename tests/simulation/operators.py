"""Operators: people who give commands about a job while its owners live.

Each command runs the real code in a process of its own, which may die at any step. A command that has failed is
repeated, and sometimes two people give it at the same time. What it returns is compared with the model at once; what it
leaves behind, whoever opens the job next finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from statemgr import JobConfig, StateManager
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import (
    CorruptError,
    InvalidError,
    LayoutMismatch,
    MissingError,
    MissingState,
    PermissionNeeded,
    StatemgrError,
)
from statemgr.flows.opening.open_job import JobTopics
from statemgr.health.stages import positions
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model.checkpoint import Checkpoint
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
from statemgr.operations.rescale.plan import plan_rescale
from statemgr.operations.rescale.rescale import Workers, rescale
from statemgr.operations.rescale.undo import undo
from statemgr.operations.rollback.owner import Goal, keep, roll_back
from statemgr.operations.standby.process import Standby
from statemgr.ports import no_progress
from statemgr.reader import JobReader
from statemgr.services import Services
from statemgr.testing.memory_kafka import Group
from tests.simulation.model import SOURCE, STORES, TASK, TOPIC, Model, State, Wrong
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
)
_OF_ANOTHER_RESCALE = "has records that no rescale on this machine wrote"
#: The partitioner of the input's producers, which the state of a single task does not show.
_PARTITIONER = "murmur2"
_RESCALED_TO = 2
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


class Operators:
    """Gives commands."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._scheduler, self._model = history.scheduler, history.model
        #: the configurations of copies that were made of the job, and the position of each
        self.copies: list[tuple[JobConfig, int]] = []
        #: whether the job of other software is adopted; None if there is none
        self.adopted: bool | None = None
        #: whether a command has reported that it did this itself
        self._was_adopted_by_one = False
        #: whether a rescale may be in force
        self.is_rescaled = False
        #: whether the layout before the last rescale is still there for sure
        self._may_undo = True
        self._rescaled_s = 0.0
        #: the stores whose changelogs a rescale may have begun to write, and died
        self._begun_changelogs = set[str]()
        #: the numbers of the rescale commands that were given
        self._rescales = set[int]()
        #: the models of the tasks of a rescale that is in force for sure, and configuration keys with their new values
        self.parts: list[Model] = []
        self.layout: Mapping[str, int | str] = {}

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
        if history.stages and not self.is_rescaled and scheduler.chance(f"step after {number}", 0.6):
            self._give(f"migrate-{number}", "operator", number, self._migrate)
        if self.adopted and scheduler.chance(f"adopts again after {number}", 0.1):
            self._give(f"adopt again-{number}", "operator", number, self._adopt)
        commands: dict[str, Command] = {
            "materialize": self._materialize, "read": self._read, "standby": self._follow, "verify": self._verify,
        }  # fmt: skip
        if self.parts:  # owners work in the new layout
            commands |= {"rollback": self._go_back, "keep": self._keep}
            if scheduler.chance(f"command in the new layout after {number}", 0.5):
                self._choose(commands, number)
            self._undo(number, f"machine-{number % 2}", 0.3)
            return
        may_rescale = history.tasks == 1 and not history.loses_checkpoints and not history.has_member
        # an owner that writes changelogs again would be asked for permission to overwrite what such a rescale has left
        may_rescale = may_rescale and self._begun_changelogs <= _changelogs(history.config("", number))
        if not history.loses_checkpoints:  # what these leave on the topic must stay
            commands["copy"] = self._copy
        if history.tasks == 1:
            commands["rollback"] = self._go_back
            if not history.loses_checkpoints:
                commands["keep"] = self._keep
            if may_rescale:
                commands["rescale"] = self._rescale
        if may_rescale and scheduler.chance(f"rescale after {number}", 0.04):
            commands = {"rescale": self._rescale}
        elif not scheduler.chance(f"command after {number}", 0.35):
            return
        if self._choose(commands, number) == "rescale":
            self._undo(number, f"machine-{number % 2}", 0.3 if self.parts else 1.0)

    def _choose(self, commands: Mapping[str, Command], number: int) -> str:
        """Give one of the commands. Returns: its name."""
        decide = self._scheduler.decide
        kind = [*commands][decide(f"kind of command after {number}", len(commands))]
        if kind == "rescale":
            self._rescales.add(number)
        self._give(f"{kind}-{number}", f"machine-{decide(f'machine of command {number}', 3)}", number, commands[kind])
        return kind

    def may_collect(self) -> bool:
        """Whether garbage may be collected: not while nobody knows the layout. After a day, this ends the way back."""
        if self.is_rescaled and not self.parts:
            return False
        if self._scheduler.now - self._rescaled_s > _COLLECTED_S:
            self._may_undo = False
        return True

    @property
    def stays_rescaled(self) -> bool:
        """Whether the job is in the new layout, and nobody goes back."""
        return bool(self.parts) and (not self._may_undo or self._scheduler.decide("stays rescaled", 2) > 0)

    def _undo(self, number: int, machine: str, probability: float) -> None:
        if self._scheduler.chance(f"undo after {number}", probability):
            for life in range(3):
                if self.is_rescaled and self._may_undo:
                    self._give(f"undo-{number}-{life}", machine, number, self.go_back_to_the_old_layout)

    def _give(self, name: str, machine: str, number: int, work: Command) -> None:
        """Give a command until it ends well, up to three times, and sometimes twice at once."""
        scheduler, history = self._scheduler, self._history
        for attempt in range(3):
            config, ended = history.config(machine, number), list[str]()
            threads: list[tuple[Process, Thread]] = []
            for twin in range(1 + (scheduler.decide(f"twice {name}", 5) == 0)):
                moment = f"{name}-{attempt}{'-twin' * twin}"
                process = Process(moment, machine)

                give = partial(self._work, work, moment, config, ended)
                scheduler.note(f"{moment} begins")
                threads.append((process, scheduler.start(moment, process, give)))
            for process, thread in threads:
                history.wait_for(thread, process)
                scheduler.kill(process)
            if ended:
                return

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
            if isinstance(error, PermissionNeeded) and _OF_ANOTHER_RESCALE in error.message and len(self._rescales) > 1:
                return  # an earlier command has left records, and was given on another machine, or its disk is lost
            self._history.expect(error, config)

    @contextmanager
    def _opened(self, config: JobConfig, *, owned: bool = False) -> Iterator[tuple[Services, CheckpointTopic]]:
        with (
            closing(self._history.services(config)) as services,
            closing(CheckpointTopic(config, services.clock, owned=owned)) as log,
        ):
            yield services, log

    # --- commands that fence nobody ------------------------------------------------------------------------------

    def _materialize(self, moment: str, config: JobConfig) -> None:
        """Build first snapshots from changelogs, and offer them."""
        if config.snapshot_interval.is_every_commit:
            return
        with self._opened(config) as (services, log):
            records = log.read()
            for task, store in stores_of(services, records):
                if records[task].current.marker("kafka-changelog", store):
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
            self._scheduler.note(f"{' and '.join(stores or STORES)} from stage {step.stage} to {step.target}")

    def _copy(self, moment: str, config: JobConfig) -> None:
        """Clone the job into a new one."""
        target_config = JobConfig.from_mapping(config.to_mapping(), {"job.name": f"{config.job_name}-{moment}"})
        with (
            closing(self._history.services(config)) as source,
            self._opened(target_config, owned=True) as (target, log),
            JobReader(config, services=self._history.services) as reader,
        ):
            try:
                tasks = look(source, target, reader.records(), log, ())
                position = next(one.checkpoint.input_offsets[SOURCE] for one in tasks if one.record.task == TASK)
                copied = copy(source, target, log, tasks, no_progress)
            except (MissingError, CorruptError) as error:
                self._scheduler.note(f"{type(error).__name__}: {error.message}")
                return  # the job may have dropped the checkpoint meanwhile
        self._scheduler.note(f"copied {position} to {target_config.job_name}")
        if len(copied.checkpoints) != len(tasks):
            raise Wrong(f"a copy of {len(tasks)} tasks has published {len(copied.checkpoints)}")
        self.copies.append((target_config, position))

    def compare_copy(self, config: JobConfig, position: int) -> None:
        """A copy has what it had at first. The first opening of each task ends the copy's clean-up."""
        with StateManager(config, services=self._history.services) as manager, manager.open_task(TASK) as task:
            checkpoint = task.last_checkpoint
            if checkpoint is None or checkpoint.input_offsets[SOURCE] != position:
                raise Wrong(f"the copy at {position} opened at {checkpoint and checkpoint.input_offsets}")
            self._model.compare_state(position, {store: dict(task.store(store).range()) for store in STORES})
        self.compare_others(config)

    def compare_others(self, config: JobConfig) -> None:
        """The tasks after the first one have what they had."""
        for number in range(1, config.tasks):
            with (
                StateManager(config, services=self._history.services) as manager,
                manager.open_task(task_name(number)) as task,
            ):
                self._model.compare_other(task.last_checkpoint, task)

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
            model.kept.discard(wanted)
            keep(services, log, JobTopics(services), wanted, is_kept=is_kept)
            if is_kept:
                model.kept.add(wanted)
            else:
                model.kept.discard(wanted)  # somebody may have kept it meanwhile
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
        """Give the job two tasks, and look at them."""
        history, model = self._history, self._model
        self._begun_changelogs |= _changelogs(config)
        with self._opened(config, owned=True) as (services, log), self._workers(config) as workers:
            acked = model.acked
            records = log.read()
            if records and len(records) == _RESCALED_TO:
                return
            plan = plan_rescale(config, records, _RESCALED_TO, None)
            self.is_rescaled = model.was_rescaled = self._may_undo = True
            self._rescaled_s = self._scheduler.now
            done = rescale(services, log, _RESCALED_TO, workers, no_progress, chosen=_PARTITIONER)
        self._scheduler.note(f"rescaled to {len(done.checkpoints)} tasks")
        at = done.checkpoints[TASK].input_offsets[SOURCE]
        self.parts = [model.part(number, _RESCALED_TO, at) for number in range(_RESCALED_TO)]
        self.layout = plan.changes
        found: State = {store: {} for store in STORES}
        for number in range(_RESCALED_TO):
            with (
                StateManager(plan.new_config, services=history.services) as manager,
                manager.open_task(task_name(number)) as task,
            ):
                for store in STORES:
                    mine = dict(task.store(store).range())
                    if mine.keys() & found[store].keys():
                        raise Wrong(f"two tasks have keys of {store}: {mine.keys() & found[store].keys()}")
                    found[store] |= mine
                checkpoint = task.last_checkpoint
                assert checkpoint is not None
                if number == 0:
                    position = checkpoint.input_offsets[SOURCE]
        if position < min(acked, model.acked, *model.going_back):
            raise Wrong(f"rescaled at {position}, but {acked} was acknowledged before")
        model.compare_state(position, found, as_of_now=False)

    def go_back_to_the_old_layout(self, moment: str, config: JobConfig) -> None:
        """Take a rescale back."""
        new = JobConfig.from_mapping(config.to_mapping(), {"job.tasks": _RESCALED_TO})
        self.parts, self.layout = [], {}
        with self._opened(config, owned=True) as (services, log):
            records = log.read()
            if records and len(records) == 1:
                self.is_rescaled = False
                return
        self.is_rescaled = True  # until its outcome is known: whoever gives it a second time may undo the undo
        with self._opened(new, owned=True) as (services, log):
            done, _ = undo(services, log, self._history.services, no_progress)
        self.is_rescaled = done.after.tasks == _RESCALED_TO
        self._scheduler.note(f"back in the layout with {done.after.tasks} tasks")

    @contextmanager
    def _workers(self, config: JobConfig) -> Iterator[Workers]:
        """Two workers of a command, each with services of its own."""
        with self._history.executors().pool("workers", 2) as pool:

            def work(function: Callable[..., Any], *arguments: object) -> Any:
                with closing(self._history.services(config)) as services:
                    return function(services, *arguments)

            yield Workers(lambda function, *given: pool.submit(work, function, *given), 2, self._history.services)
