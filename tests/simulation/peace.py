"""What must hold in the end, when no fault happens any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from statemgr import JobConfig, StateManager
from statemgr.errors import CorruptError, MissingBlob, MissingState, PermissionNeeded, StatemgrError
from statemgr.flows.opening.restore import restore_task
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model import codecs
from statemgr.model.checkpoint import Retention
from statemgr.operations.gc.gc import collect_garbage
from statemgr.operations.gc.needed_blobs import find_needed_blobs
from statemgr.ports import no_progress
from tests.simulation.losses import LOSSES
from tests.simulation.model import BACKENDS, DAY_S, PLUG_IN, STORES, Model, State, Wrong
from tests.simulation.owners import LastOwner

if TYPE_CHECKING:
    from tests.simulation.history import History

#: The ends of keys of stores that a copy has of its own.
_OF_COPY = (".backup.factories", ".restore.factories", ".changelog.topic")


class Peace:
    """Looks at a history that is over."""

    def __init__(self, history: History) -> None:
        self._history = history

    def check(self) -> None:
        """Without faults, everything works, and everything is as it should be."""
        history = self._history
        scheduler = history.scheduler
        scheduler.sleep(1000.0)
        history.look_after_servers()
        backends = [*BACKENDS, *([PLUG_IN] if history.plugs_in else ())]
        both = {"task.backup.factories": backends}
        history.losses.delete_made_topics()
        if history.loses and LOSSES[scheduler.decide("what is lost", len(LOSSES))] == "tail":
            topic = history.config("", 0).stores[STORES[scheduler.decide("which tail is lost", 2)]].changelog_topic
            if topic in history.broker.topics:
                history.losses.lose_tail(topic, "at peace")
        if history.loses_checkpoints and scheduler.decide("checkpoints are lost at peace", 2):
            history.losses.lose_checkpoints("at peace")
        if history.operators.goes_back_at_peace():
            history.in_process("undo", "machine-0", self._go_back)
            history.in_process("settle", "machine-0", partial(history.operators.settle, "settle"))
        history.in_process("last owner", "machine-0", self._end_well, both)
        self._check_disk("machine-0")
        self._in_each_copy(history.operators.compare_copy)  # an opening ends the clean-up of a copy that died
        if "damaged blob" in history.seen:  # whoever reads it notices it, and the next commit stores everything again
            history.in_process(
                "reader of damage", "reader", self._end_well, {**both, "task.restore.factories": [*BACKENDS]}
            )
        at_once = scheduler.decide("older checkpoints at once", 2)
        if at_once:
            history.in_process("older checkpoints", "new", self._restore_retained, both)
        scheduler.sleep(31 * DAY_S)
        history.look_after_servers()
        history.broker.compact_all()
        for factory in backends:
            alone = {**both, "task.restore.factories": [factory]}
            history.in_process(f"restore from {factory}", f"new-{factory.partition(':')[0]}", self._reopen, alone)
        if history.model.was_rescaled:  # the first collection takes the old layout from the topic, the second its blobs
            history.in_process("gc of layouts", "machine-0", partial(self.collect, at_peace=False), both)
        history.in_process("gc", "machine-0", partial(self.collect, at_peace=True), both)
        if not at_once:
            history.in_process("older checkpoints", "new", self._restore_retained, both)
        self._in_each_copy(history.operators.compare_copy)
        self._in_each_copy(lambda config, copied: self.collect(config, at_peace=True))

    def _go_back(self, config: JobConfig) -> None:
        """Take the last rescale back. The changelogs that a command to another number of tasks has left are deleted
        first, as the errors say."""
        history = self._history
        for _ in STORES:
            try:
                return history.operators.go_back("undo", config)
            except PermissionNeeded as error:
                history.broker.delete(str(error.where["topic"]))
        return history.operators.go_back("undo", config)

    def _in_each_copy(self, work: Callable[[JobConfig, Mapping[str, tuple[Model, int]]], None]) -> None:
        """Do something with each copy of the job, which is given with what it has."""
        history = self._history
        for made in history.operators.copies:
            of_copy = {
                key: value
                for key, value in made.config.to_mapping().items()
                if key in ("job.name", "job.tasks", "task.inputs") or key.endswith(_OF_COPY)
            }

            def look(config: JobConfig, copied: Mapping[str, tuple[Model, int]] = made.copied) -> None:
                work(config, copied)

            history.in_process(made.config.job_name, "new", look, of_copy)

    def _end_well(self, config: JobConfig) -> None:
        history = self._history
        for part in history.parts:
            with StateManager(config, services=history.services) as manager:
                LastOwner(history, manager, "last owner", [part]).run()
        if not history.operators.parts:
            commit_at = history.model.acked if history.has_owners_of_all else None
            history.operators.compare_others(config, commit_at=commit_at)

    def _reopen(self, config: JobConfig) -> None:
        history = self._history
        for name, model in history.parts:
            acked = model.acked
            with StateManager(config, services=history.services) as manager, manager.open_task(name) as task:
                if model.compare(task.last_checkpoint, task, acked) != acked:
                    raise Wrong("the last commit is not the current one")
        if history.has_owners_of_all:
            history.operators.compare_others(config)

    def _restore_retained(self, config: JobConfig) -> None:
        """Restore every retained checkpoint."""
        history = self._history
        for part in history.parts:
            self._restore_retained_of(config, *part)

    def _restore_retained_of(self, config: JobConfig, task: str, model: Model) -> None:
        history = self._history
        with closing(history.services(config)) as services, closing(CheckpointTopic(config, services.clock)) as log:
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
                    if not history.lost_blobs and all(checkpoint.marker(BACKENDS[0], store) for store in STORES):
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
        history = self._history
        job = history.directory / machine / history.name / "1"
        for task, _ in history.parts:
            for store in STORES:
                root = job / task.replace(" ", "_") / store
                states = [path for path in (root / "committed").iterdir() if path.is_dir()]
                left = [path.name for part in ("live", "staging", "owners") for path in (root / part).iterdir()]
                if len(states) > 2 or left:
                    raise Wrong(f"{machine} has {len(states)} states of {store} of {task}, and is left with {left}")

    def collect(self, config: JobConfig, *, at_peace: bool) -> None:
        history = self._history
        with closing(history.services(config)) as services, closing(CheckpointTopic(config, services.clock)) as log:
            try:
                report = collect_garbage(services, log, no_progress, delete=True)
            except StatemgrError as error:
                if isinstance(error, MissingBlob | CorruptError) and history.lost_blobs:
                    return  # nobody knows what the checkpoint needs that has lost its index
                if at_peace or not isinstance(error, MissingState | PermissionNeeded):
                    history.model.expect(error)
                if at_peace:
                    raise
                return
            history.scheduler.note(f"gc deletes {report.deleted.blobs} blobs")
            missing = [*report.missing, *(layout.lost for layout in report.layouts if layout.lost)]
            if (not history.lost_blobs and missing) or (at_peace and (report.failed or report.expiring)):
                raise Wrong(f"gc: missing {missing}, failed {report.failed}, expiring {report.expiring}")
            if not at_peace or any(layout.lost for layout in report.layouts):
                return
            self._check_topic(log)
            needed = set(find_needed_blobs(services, log, allow_no_checkpoints=False).needed)
            # the next owner of such a task removes their TTLs, or deletes them
            expiring = {one.blob_id for record in log.read().values() for one in record.current.outstanding_ttl}
        prefix = f"{config.job_name}/{config.job_id}/"
        left = {name for name in history.bucket.names() if name.startswith(prefix) and name not in expiring - needed}
        if left - needed or needed - left - history.bucket.lost:  # a kept checkpoint may need what was lost
            raise Wrong(
                f"after gc: {len(left - needed)} blobs too many {sorted(left - needed)[:3]}, "
                f"missing {sorted(needed - left)[:3]}"
            )
