"""What must hold before a job moves to another stage. Each is tried; nothing that is published changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from statemgr.backends.changelog.integrity import unexplained
from statemgr.config import JobConfig
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.errors import MissingError, PermissionNeeded, RetryableError, StatemgrError
from statemgr.flows.opening.opening_checks import refuse_lost_checkpoint
from statemgr.health.checks import Report, Status, blob_directory, check_blobs, check_brokers
from statemgr.health.stages import StoreStatus, positions, survey
from statemgr.health.verify_blobs import verify_blobs
from statemgr.ids import task_index, task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local.temporary import temporary_directory
from statemgr.logs import counted
from statemgr.model.checkpoint import ChangelogMarker, CheckpointRecord
from statemgr.model.jobs.stages import Stage, Step, StorePosition
from statemgr.ports import Progress
from statemgr.reader import JobReader
from statemgr.services import Services
from statemgr.wiring import open_services

_PROBE_SIZE = 8 * 1024 * 1024
#: What to do about a changelog that has lost state.
_WRITE_AGAIN = "start the job as it is configured: its next commit writes the whole state to the changelog again"


@dataclass(frozen=True)
class Precondition:
    """One precondition. ``fix``: what to do if it is not met."""

    name: str
    met: bool
    detail: str
    fix: str | None = None


@dataclass(frozen=True)
class FirstCommits:
    """What the first commits in the new stage write to a backend that is switched on.

    ``size``: bytes. ``seconds``: how long that takes at the speed of a trial; None if no speed is known. ``offered``:
    how many stores write nothing, because an offer of a first snapshot waits for them.
    """

    size: int
    seconds: float | None
    offered: int


def check(
    services: Services,
    reader: JobReader,
    step: Step,
    positions: Sequence[StorePosition],
    records: Sequence[CheckpointRecord],
    trials: int,
    progress: Progress,
) -> tuple[list[Precondition], FirstCommits | None]:
    """Every precondition of a step; and what its first commits write, if it switches a backend on.

    Raises: UnavailableError, AccessDenied.
    """
    found = survey(services, positions, reader.offers())
    forward = step.target > step.stage
    switched_on = step.target in (Stage.DUAL_COMMIT, Stage.BLOBS_FIRST) and step.stage in (Stage.CHANGELOG, Stage.BLOBS)
    conditions = [
        _complete(services, records),
        settled(step, positions, forward),
        _restorable(services, step, positions),
    ]
    if KAFKA_CHANGELOG in step.target.backup:
        conditions.append(_own_changelogs(services, reader, positions))
    if not switched_on:
        needed = BLOB_STORE if forward else KAFKA_CHANGELOG
        conditions.append(newest_markers(positions, needed))
        conditions += _trials(reader, found, needed, trials, progress)
    if step.stage is not Stage.CHANGELOG and services.config.get("blob.store.uri") is not None:
        conditions.append(_blobs(services, reader, progress))
    conditions += _rights(services)
    if not switched_on:
        return conditions, None
    filled = [one for one in found if one.offer is None or not forward]
    amount = sum(one.size for one in filled)
    seconds = _upload_seconds(services, amount) if forward else None
    return conditions, FirstCommits(amount, seconds, len(found) - len(filled))


def check_again(
    config: JobConfig, step: Step, stores: Sequence[str], services: Callable[[JobConfig], Services] = open_services
) -> None:
    """Look once more before the configuration changes: the checks before it may have taken hours.

    Args:
        services: makes the adapters, the clock, the source of IDs and the threads.

    Raises: RetryableError if the first opening in the next stage would be refused: a process with an older
        configuration has committed meanwhile, or a changelog has lost state.
    """
    with closing(services(config)) as opened, JobReader(config, only_settled=True, services=services) as reader:
        found = _restorable(opened, step, positions(opened, reader.retaining(), stores))
    if found.fix == _WRITE_AGAIN:
        raise RetryableError(
            found.detail,
            hint=f"{found.fix}. Then run the same command again; the configuration is unchanged",
            job=config.job_name,
        )
    if not found.met:
        raise RetryableError(
            f"{found.detail}: somebody has committed with another configuration while the step was checked",
            hint="restart every process of the job, and run the same command again; the configuration is unchanged",
            job=config.job_name,
        )


def _complete(services: Services, records: Sequence[CheckpointRecord]) -> Precondition:
    """Every task has a checkpoint, except those that never had input."""
    config, found = services.config, {record.task for record in records}
    names = {task_name(number) for number in range(config.tasks)}
    detail = f"{len(found)} of {config.tasks} tasks have one"
    if found - names:
        return Precondition("checkpoints", False, detail, "set job.tasks to the number of tasks that the job has")
    if names == found:
        return Precondition("checkpoints", True, detail)
    with closing(CheckpointTopic(config, services.clock)) as log:
        found |= log.read().keys()  # also those that have committed meanwhile
        for task in sorted(names - found, key=task_index):
            try:
                refuse_lost_checkpoint(services, log, task, look_at_blobs=True)
            except PermissionNeeded as error:
                return Precondition("checkpoints", False, f"{task}: {error.message}", error.hint)
    return Precondition("checkpoints", True, f"{detail}, and the others have no state yet")


def settled(step: Step, positions: Sequence[StorePosition], forward: bool) -> Precondition:
    """No store is between stages. On the way back from stage 4 they may be: it was interrupted."""
    others = [one for one in positions if one.stage is None]
    if others:
        fix = "move one store at a time with --store"
        return Precondition("stage", False, f"store {others[0].store} uses other backends", fix)
    turned = next((one for one in positions if forward and one.configured and (one.stage or 0) > one.configured), None)
    if turned is not None:
        detail = f"{turned.record.task} / {turned.store} is in stage {turned.stage}, and the configuration asks for "
        fix = "restart the job with its configuration, and wait with `statemgr migrate rollback --wait`"
        return Precondition("stage", False, f"{detail}stage {turned.configured}", fix)
    allowed = {step.stage} if forward and not step.written else {step.stage, step.target}
    elsewhere = [one for one in positions if one.stage not in allowed]
    stages = sorted({int(one.stage or 0) for one in positions})
    if not elsewhere:
        return Precondition("stage", True, f"all stores are in stage {' or '.join(map(str, stages))}")
    one = next((one for one in elsewhere if one.stage != one.configured), elsewhere[0])
    detail = f"{one.record.task} / {one.store} is in stage {one.stage}, not {step.stage.value}"
    if one.stage != one.configured:
        fix = "restart the job with its configuration, and wait with `statemgr migrate advance --wait`"
        return Precondition("stage", False, detail, fix)
    moved = sorted({other.store for other in positions if other.stage is step.stage})
    fix = "move the stores of one stage at a time: use `statemgr migrate " + ("advance" if forward else "rollback")
    options = " ".join(f"--store {name}" for name in moved)
    return Precondition("stage", False, f"{detail}, and the configuration keeps it there", f"{fix} {options}`")


def _restorable(services: Services, step: Step, positions: Sequence[StorePosition]) -> Precondition:
    """The first opening in the next stage has something to restore from. Raises: UnavailableError, AccessDenied."""
    stores, changelogs = services.config.stores, services.backup_manager(KAFKA_CHANGELOG)
    without = []
    for one in positions:
        listed = stores[one.store].restore_factories if step.written and one.store in stores else step.target.restore
        markers = [one.record.current.marker(factory, one.store) for factory in listed]
        losses = [changelogs.loss_of(marker) for marker in markers if marker is not None]
        if not losses or all(losses):
            without.append((one, next(iter(losses), None)))
    if not without:
        return Precondition("restore", True, "a backend of the next restore list has every store")
    first, loss = without[0]
    if loss is not None:
        detail = f"the changelog of {first.record.task} / {first.store} has lost state: {loss}"
        return Precondition("restore", False, detail, _WRITE_AGAIN)
    has = sorted(name for name, of in first.record.current.state_checkpoint_markers.items() if first.store in of)
    return Precondition(
        "restore",
        False,
        f"no backend of the next restore list has {first.record.task} / {first.store}",
        f"add {' or '.join(has)} to task.restore.factories until every task has committed in the new stage",
    )


def _own_changelogs(services: Services, reader: JobReader, positions: Sequence[StorePosition]) -> Precondition:
    """The next opening is allowed to write to the changelogs. Those that the checkpoints name are the job's own."""
    permitted = {permit.task for permit in reader.permits() if permit.permissions.overwrite_changelog}
    for one in positions:
        current, store = one.record.current, services.config.stores.get(one.store)
        if store is None or one.record.task in permitted:
            continue
        topic, marker = store.changelog_topic, current.marker(KAFKA_CHANGELOG, one.store)
        if isinstance(marker, ChangelogMarker) and marker.topic == topic:
            continue
        try:
            retired = current.retired_changelogs.get(one.store, ())
            count = unexplained(services.changelog(), topic, task_index(one.record.task), retired)
        except MissingError:
            continue  # the opening creates the topic
        if count is not None:
            detail = f"{topic} has {count} records that this job did not write"
            fix = f"correct stores.{one.store}.changelog.topic; to delete the records, use `statemgr permit "
            return Precondition("changelogs", False, detail, fix + "--overwrite-changelog`")
    return Precondition("changelogs", True, "no changelog has records that this job did not write")


def newest_markers(positions: Sequence[StorePosition], factory: str) -> Precondition:
    """A backend has the newest checkpoint of every store."""
    without = [one for one in positions if one.record.current.marker(factory, one.store) is None]
    detail = f"{factory} has the newest checkpoint of every task"
    fix = "wait until every task has committed"
    if without:
        stores = counted(len(without), "store")
        detail = f"{factory} lacks the newest checkpoint of {stores}, such as {without[0].record.task}"
    if factory == BLOB_STORE:
        fix += "; if the state is too large for one commit, run `statemgr materialize`, and restart the job"
    return Precondition("markers", not without, detail, fix)


def _trials(
    reader: JobReader, found: Sequence[StoreStatus], factory: str, trials: int, progress: Progress
) -> Iterator[Precondition]:
    """Restore the largest tasks from the backend that the next stage restores from."""
    sizes: dict[str, int] = {}
    stores: dict[str, list[str]] = {}
    for one in found:
        task = one.position.record.task
        sizes[task] = sizes.get(task, 0) + one.size
        stores.setdefault(task, []).append(one.position.store)
    for task in sorted(sizes, key=lambda name: -sizes[name])[:trials]:
        with temporary_directory() as directory:
            name, into = f"restore of {task} from {factory}", directory / "restored"
            try:
                restored = reader.restore(task, into, None, stores[task], [factory], progress)
            except StatemgrError as error:
                if isinstance(error, RetryableError):
                    raise
                yield Precondition(name, False, error.message, error.hint)
            else:
                seconds = sum(one.seconds for one in restored)
                fetched = sum(one.bytes_fetched for one in restored)
                yield Precondition(name, True, f"{fetched:,} bytes in {seconds:.1f} s")


def _blobs(services: Services, reader: JobReader, progress: Progress) -> Precondition:
    found = verify_blobs(services, reader.records, (), 0.0, progress)
    if found.damaged:
        fix = "use `statemgr snapshots verify` to see all of them"
        return Precondition("blobs", False, f"{found.damaged[0].blob_id}: {found.damaged[0].problem}", fix)
    if found.expiring:
        detail = f"{counted(len(found.expiring), 'blob')} with a TTL, such as {found.expiring[0].blob_id}"
        return Precondition("blobs", False, detail, "use `statemgr gc --fix --write` to remove it")
    return Precondition("blobs", True, f"all {found.blobs} blobs are there, and none has a TTL")


def _rights(services: Services) -> Iterator[Precondition]:
    """Every kind of request that a job makes to the brokers and to the blob store is tried."""
    kafka, blobs = Report(), Report()
    check_brokers(kafka, services.config)
    if services.config.get("blob.store.uri") is None:
        blobs.problem("blobs", "blob.store.uri is not set", "set blob.store.uri")
    else:
        check_blobs(blobs, services.config, fix=False)
    for name, report in (("Kafka", kafka), ("blob store", blobs)):
        problem = next((one for one in report.findings if one.status is Status.PROBLEM), None)
        if problem is None:
            untried = not any(one.status is Status.OK for one in report.findings)
            detail = report.findings[0].detail if untried else "every kind of request was allowed"
            yield Precondition(name, True, detail)
        else:
            yield Precondition(name, False, f"{problem.check}: {problem.detail}", problem.fix)


def _upload_seconds(services: Services, amount: int) -> float | None:
    """An estimate of the time of an upload, from a trial upload of 8 MiB. The job uploads in parallel, which is usually
    faster. None without a trial: in a directory that is missing or empty, it would hide from a job that its disk is not
    mounted."""
    if services.config.get("blob.store.uri") is None:
        return None
    directory = blob_directory(services.config)
    blob_id = f"{services.config.job_key}/_doctor/{services.ids.attempt_id()}"
    try:
        if directory is not None and not (directory.exists() and os.listdir(directory)):
            return None
        started = services.clock.monotonic()
        services.blobs().put(blob_id, os.urandom(_PROBE_SIZE), ttl_days=services.config.ttl_days)
        seconds = services.clock.monotonic() - started
        services.blobs().delete(blob_id)
    except (StatemgrError, OSError):
        return None  # the check of the rights says why
    return amount / _PROBE_SIZE * seconds
