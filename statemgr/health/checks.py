"""What ``statemgr doctor`` checks: this machine, the brokers, the job's topics, and the blob store.

The checks write a file to ``state.dir``, a record to a temporary topic and a blob, and remove them. They fence nobody.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from statemgr.config import JobConfig
from statemgr.errors import InvalidError, LayoutMismatch, MissingState, PermissionNeeded, StatemgrError
from statemgr.ids import task_name
from statemgr.logs import counted
from statemgr.os_errors import Fault, fault_of
from statemgr.terminal.find_java import find_java
from statemgr.terminal.output import describe

if TYPE_CHECKING:
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.kafka.topics import TopicAdmin
    from statemgr.model.checkpoint import CheckpointRecord
    from statemgr.ports import BlobStore, Clock

#: Beyond this, times in checkpoint IDs and TTLs mislead people.
CLOCK_TOLERANCE_MS = 5_000
#: Less free space (bytes) than this is worth a note: a checkpoint is hard links, but compaction needs room.
_LITTLE_SPACE = 1024**3
_NO_SPACE = 64 * 1024**2
_SPACE_HINT = "free space, or set state.dir to a larger disk"
_CONTENT = b"statemgr doctor"


class Status(StrEnum):
    """Only a problem makes the exit status 1."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``fix`` is what to do or to run."""

    check: str
    status: Status
    detail: str
    fix: str | None = None


class Report:
    """Collects findings, and passes each to ``show`` at once."""

    def __init__(self, show: Callable[[Finding], None] | None = None) -> None:
        self.findings: list[Finding] = []
        #: The findings that a typed error made, and that error.
        self.errors: list[tuple[Finding, StatemgrError]] = []
        self._show = show

    def add(self, check: str, status: Status, detail: str, fix: str | None = None) -> None:
        self.findings.append(Finding(check, status, detail, fix))
        if self._show is not None:
            self._show(self.findings[-1])

    def ok(self, check: str, detail: str) -> None:
        self.add(check, Status.OK, detail)

    def note(self, check: str, detail: str, fix: str | None = None) -> None:
        self.add(check, Status.NOTE, detail, fix)

    def problem(self, check: str, detail: str, fix: str | None = None) -> None:
        self.add(check, Status.PROBLEM, detail, fix)

    @contextmanager
    def guarded(self, check: str) -> Iterator[None]:
        """Report a typed error inside the block as a problem. Its hint is the fix."""
        try:
            yield
        except StatemgrError as error:
            self.problem(check, _described(error), error.hint)
            self.errors.append((self.findings[-1], error))


def _described(error: StatemgrError) -> str:
    return f"{type(error).__name__}: {describe(error)}"


# --- this machine ---------------------------------------------------------------------------------------------------


def check_java(report: Report) -> None:
    """Spark and the local broker need Java 17; nothing else does."""
    try:
        java = find_java()
        report.ok("java", f"Java {java.version} at {java.program}")
    except StatemgrError as error:
        if importlib.util.find_spec("pyspark") is not None:
            report.problem("java", _described(error), error.hint)
        else:
            report.note("java", f"{_described(error)} (only Spark needs it)", error.hint)


def check_disk(report: Report, config: JobConfig) -> None:
    """The state directory is writable, supports hard links, and has space."""
    with report.guarded("disk"):
        directory = config.state_dir
        try:
            has_links = _try_links(directory)
            free = shutil.disk_usage(directory).free
        except OSError as error:
            reason = f"{directory}: {error.strerror or type(error).__name__}"
            if fault_of(error) is Fault.FULL:
                report.problem("disk", reason, _SPACE_HINT)
            else:
                report.problem("directory", reason, "let this user write to it, or set state.dir to another directory")
            return
        check_space(report, directory, free)
        if not has_links:
            detail = f"{directory} does not support hard links: every checkpoint copies the whole store"
            report.note("disk", detail, "set state.dir to a directory on a local file system")


def check_space(report: Report, directory: Path, free: int) -> None:
    """Whether the disk of a directory has enough free space (bytes)."""
    room = f"{free // 1024**2:,} MiB free in {directory}"
    if free >= _LITTLE_SPACE:
        report.ok("disk", room)
    else:
        status = Status.NOTE if free >= _NO_SPACE else Status.PROBLEM
        report.add("disk", status, room, _SPACE_HINT)


def _try_links(directory: Path) -> bool:
    """Write, sync and link a file. Returns: whether links work. Raises: OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as temporary:
        file = Path(temporary, "file")
        with file.open("wb") as out:
            out.write(b"x" * 4096)
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(file, Path(temporary, "link"))
        except OSError:
            return False
        return True


# --- Kafka ----------------------------------------------------------------------------------------------------------


def check_registry(report: Report, config: JobConfig) -> None:
    """The Schema Registry answers, if the job has one."""
    if not config.schema_registry():
        return
    with report.guarded("registry"):
        from statemgr.kafka.registry.schema_registry import SchemaRegistry

        report.ok("registry", f"{counted(len(SchemaRegistry(config).subjects()), 'subject')}")


def check_brokers(report: Report, config: JobConfig) -> bool:
    """Topics, a real transaction, and the clock. Returns: whether a broker answered; the rest needs one."""
    from statemgr.kafka.temporary_topic import probe_transaction
    from statemgr.kafka.topics import BROKER_TIMES, TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
    from statemgr.local.machine import SystemClock, system_ids

    specs = [checkpoint_topic_spec(config), *changelog_topic_specs(config)]
    reached = False
    with report.guarded("kafka"), TopicAdmin(config, SystemClock()) as admin:
        problems = admin.check(specs)
        report.ok("kafka", f"reached {config.kafka_client('admin')['bootstrap.servers']}")
        for problem in problems:
            report.problem("topics", f"{problem.topic}: {problem.message}", problem.fix_command)
        if not problems:
            report.ok("topics", ", ".join(spec.name for spec in specs))
        if len(specs) > 1:  # only changelogs need the times
            for found in admin.check([replace(specs[0], config=BROKER_TIMES, never={})]):
                if found.settings:
                    detail = (
                        f"{found.topic}: {found.message} for a changelog to supply the state of an older checkpoint"
                    )
                    report.note("topics", detail, found.fix_command)
        if (alone := admin.only_copy(specs[0])) is not None:
            report.note("topics", f"{alone.topic}: {alone.message}", alone.fix_command)
        reached = True
        _check_outputs(report, config, admin)
    if reached:
        with report.guarded("transaction"):
            skew = probe_transaction(config, SystemClock(), system_ids())
            report.ok("transaction", "published one and read it back")
            check_clock(report, "the broker's", skew)
    return reached


def _check_outputs(report: Report, config: JobConfig, admin: TopicAdmin) -> None:
    missing = missing_outputs(config, admin)
    for error in missing:
        report.problem("outputs", f"{error.where['topic']}: {error.message}", error.hint)
    if config.outputs and not missing:
        report.ok("outputs", ", ".join(config.outputs))


def missing_outputs(config: JobConfig, admin: TopicAdmin) -> list[MissingState]:
    """An error for each topic of ``task.outputs`` that does not exist. Raises: UnavailableError, AccessDenied."""
    from statemgr.kafka.input_topics import missing_topics

    found = admin.describe(config.outputs)
    return [missing_topics(config, [], [topic]) for topic in config.outputs if topic not in found]


def check_clock(report: Report, whose: str, skew_ms: int) -> None:
    """Whether a clock that is ``skew_ms`` ahead of this machine's is accurate enough."""
    if abs(skew_ms) <= CLOCK_TOLERANCE_MS:
        report.ok("clock", f"{whose} clock and this machine's agree")
        return
    direction = "ahead of" if skew_ms > 0 else "behind"
    report.problem(
        "clock",
        f"{whose} clock is {abs(skew_ms) / 1000:.0f} s {direction} this machine's",
        "synchronise the clocks (NTP); times in checkpoint IDs and TTLs are wrong until then",
    )


def check_job(report: Report, config: JobConfig, groups: Sequence[str]) -> bool:
    """Every record of the checkpoint topic is readable, an opening accepts them, and a consumer loop could read its
    input.

    Returns: whether there are checkpoints.
    """
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.local.machine import SystemClock

    records: Mapping[str, CheckpointRecord] = {}
    with report.guarded("checkpoints"), closing(CheckpointTopic(config, SystemClock())) as log:
        records = log.read()
        having = f"{len(records)} of {counted(config.tasks, 'task')} have one" if records else "the job has none yet"
        report.ok("checkpoints", f"all records are readable; {having}")
        if check_layout(report, config, records):
            _check_opening(report, config, log, records)
    _check_inputs(report, config, records)
    for group in groups:
        with report.guarded("group"):
            _check_group(report, config, group)
    return bool(records)


def check_layout(report: Report, config: JobConfig, records: Mapping[str, CheckpointRecord]) -> bool:
    """Whether the checkpoints were made with as many tasks as the configuration has. (Version 1 does not say.)"""
    layouts = sorted({(r.layout.tasks, r.layout.partitioner) for r in records.values() if r.layout.tasks})
    for tasks, partitioner in layouts:
        if tasks == config.tasks:
            report.ok("layout", f"{counted(tasks, 'task')}, keys spread by {partitioner}")
        else:
            detail = f"the checkpoints were made with {counted(tasks, 'task')}, the configuration has {config.tasks}"
            report.problem("layout", detail, f"set job.tasks = {tasks}, or `statemgr rescale --tasks {config.tasks}`")
    if len(layouts) > 1:
        names = ", ".join(f"{counted(tasks, 'task')} by {partitioner}" for tasks, partitioner in layouts)
        report.problem("layout", f"the tasks' checkpoints disagree: {names}")
    return len(layouts) <= 1 and all(tasks == config.tasks for tasks, _ in layouts)


def _check_opening(
    report: Report, config: JobConfig, log: CheckpointTopic, records: Mapping[str, CheckpointRecord]
) -> None:
    """An opening would refuse neither the checkpoints, nor that there are none. The first refusal is reported."""
    from statemgr.flows.opening.open_job import look_at_published
    from statemgr.flows.opening.opening_checks import refuse_unrestorable
    from statemgr.model.checkpoint import Layout
    from statemgr.model.jobs.permissions import NO_PERMISSIONS
    from statemgr.model.plan import plan_stores
    from statemgr.wiring import open_services

    tasks = [task_name(index) for index in range(config.tasks)]
    layout = next((one.layout for one in records.values() if one.layout.tasks), Layout(1, config.tasks, ""))
    once = {"blob.store.retry.policy.max.retry.duration.millis": 0}  # a request to the blob store is not repeated
    impatient = JobConfig.from_mapping({**config.to_mapping(), **once})
    with report.guarded("opening"), closing(open_services(impatient)) as services:
        try:
            found, permissions = look_at_published(
                services, log, layout, tasks, NO_PERMISSIONS, serdes_follow=True, only_settled=True
            )
        except (LayoutMismatch, PermissionNeeded):
            newest = log.read()  # to the end: first checkpoints of the job may be behind an open transaction
            if newest.keys() == records.keys():
                raise
            _check_opening(report, config, log, newest)
            return
        refuse_unrestorable(services, found.values())
        factories = {name: store.restore_factories for name, store in config.stores.items()}
        for task in tasks:
            plan_stores(
                found[task].current if task in found else None,
                factories,
                durable=services.durable,
                permissions=permissions[task],
                job=config.job_name,
                task=task,
            )
        report.ok("opening", "the configuration fits the checkpoints" if found else "no sign of earlier state")


def _check_inputs(report: Report, config: JobConfig, records: Mapping[str, CheckpointRecord]) -> None:
    """Each input topic exists and has one partition per task. A job that spreads keys itself may have any number."""
    from statemgr.kafka.input_topics import InputTopics
    from statemgr.local.machine import SystemClock
    from statemgr.model.keys.partitioners import is_by_input

    if not all(is_by_input(record.layout.partitioner) for record in records.values() if record.layout.tasks):
        return
    if not config.inputs:
        report.note("inputs", "task.inputs is not set: the input topics of a consumer loop are not checked")
        return
    tasks = max((record.layout.tasks for record in records.values()), default=None)
    with (
        report.guarded("inputs"),
        closing(InputTopics(config, SystemClock())) as inputs,
        closing(config.consumer(f"statemgr-doctor-{config.job_name}")) as consumer,
    ):
        inputs.check(consumer, config.inputs, tasks)
        report.ok("inputs", ", ".join(config.inputs))
        _check_open(report, config)


def _check_open(report: Report, config: JobConfig) -> None:
    """No transaction of other software holds up an input partition for long."""
    from statemgr.kafka.metadata import TopicMetadata
    from statemgr.kafka.transactions.held_up import LONG_MS, held_up
    from statemgr.local.machine import SystemClock

    clock = SystemClock()
    with TopicMetadata(config, clock) as metadata:
        described = metadata.describe(config.inputs)
        places = [(topic, one.id) for topic, found in described.items() for one in found.partitions]
        stable, ends = metadata.ends(places, only_settled=True), metadata.ends(places)
    for place, offset in stable.items():
        if offset < ends.get(place, 0):
            found = held_up(config, place, offset, ends[place])
            now_ms = clock.time_ns() // 1_000_000
            if found.since_ms is not None and now_ms - found.since_ms >= LONG_MS:
                detail = f"{found.source} is held up. {found.describe(now_ms)}"
                report.problem("input", detail, "end the transaction: docs/runbook.md says how")


def _check_group(report: Report, config: JobConfig, group: str) -> None:
    """Whether these credentials may join a consumer group. Raises: AccessDenied, UnavailableError."""
    from statemgr.kafka.metadata import TopicMetadata
    from statemgr.local.machine import SystemClock

    with TopicMetadata(config, SystemClock()) as metadata:
        missing = ", ".join(metadata.missing_group_rights(group))
    if missing:
        report.problem(
            "group", f"{group}: this user may not {missing}", f"allow {missing} on the consumer group {group}"
        )
    else:
        report.ok("group", f"{group}: this user may read")


# --- the blob store -------------------------------------------------------------------------------------------------


def check_blobs(report: Report, config: JobConfig, *, fix: bool) -> None:
    """Every kind of request that a job makes, once and without retries. ``fix`` installs the lifecycle rule."""
    from statemgr.blobs import open_raw_blob_store
    from statemgr.local.machine import SystemClock, system_ids

    if config.get("blob.store.uri") is None:
        report.note("blobs", "blob.store.uri is not set: the job uses no blob store")
        return
    with report.guarded("blobs"):
        directory = blob_directory(config)
        if directory is not None and _is_unused(directory):
            above = next(path for path in (directory, *directory.parents) if os.path.exists(path))
            missing = "is empty" if above == directory else "does not exist"
            if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
                advice = "if it should have blobs, check the URI, and that its disk is mounted"
                report.note("blobs", f"{directory} {missing}: nothing was tried; a new job begins like this", advice)
            else:
                advice = "check the URI, and that its disk is mounted; or create it for the user of the job"
                report.problem("blobs", f"{directory} {missing}, and nothing can be made in {above}", advice)
            return
        clock = SystemClock()
        with closing(open_raw_blob_store(config, clock)) as store:
            _try_requests(
                report, store, f"{config.job_key}/_doctor/{system_ids().attempt_id()}", config.ttl_days, clock
            )
            if fix:
                with report.guarded("blob lifecycle"):
                    for done in store.administration.fix():
                        report.ok("blob lifecycle", done)
            for text in store.administration.probe():
                if text.startswith("note:"):
                    report.note("blob store", text.removeprefix("note:").strip())
                else:
                    report.problem("blob store", text)  # it says itself what to do


def _is_unused(directory: Path) -> bool:
    """Whether a directory is missing or empty: a test blob would hide from a job that its disk is not mounted."""
    try:
        return not os.listdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # the requests say why


def blob_directory(config: JobConfig) -> Path | None:
    """The blob store's directory on this machine, if it is one."""
    parts = urlsplit(config.blob_uri or "")
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _try_requests(report: Report, store: BlobStore, prefix: str, ttl_days: int, clock: Clock) -> None:
    """Stops at the first failure, but always tries to delete what was put. Raises: StatemgrError."""
    # a clean-up deletes many blobs with one request, which some servers refuse
    blob_id, *_ = names = [f"{prefix}/{number}" for number in range(2)]
    before = clock.time_ns()
    store.put(blob_id, _CONTENT, ttl_days=ttl_days)
    after = clock.time_ns()
    report.ok("blob put", "with a TTL")
    try:
        store.put(names[1], _CONTENT, ttl_days=ttl_days)
        with report.guarded("blob get"):
            _try_get(report, store, blob_id)
        _try_overwrite(report, store, blob_id)
        check_clock(report, "the blob store's", store.stat(blob_id).modified_ms - (before + after) // 2_000_000)
        with report.guarded("blob TTL"):
            store.remove_ttl(blob_id)
            report.ok("blob TTL", "removed")
    finally:
        with report.guarded("blob delete"):
            for error in store.delete_many(names).values():
                raise error
            report.ok("blob delete", "several at once, as a clean-up does")


def _try_get(report: Report, store: BlobStore, blob_id: str) -> None:
    """The whole blob, and from the middle on, as a restore continues."""
    for offset in (0, len(_CONTENT) // 2):
        buffer, filled = bytearray(len(_CONTENT) + 1), 0
        with store.get(blob_id, offset) as reader:
            while read := reader.readinto(memoryview(buffer)[filled:]):
                filled += read
        if bytes(buffer[:filled]) != _CONTENT[offset:]:
            detail = "the blob store returned other bytes than it was sent"
            report.problem("blob get", detail, "use another blob store: this one changes data")
            return
    report.ok("blob get", "what was put came back")


def _try_overwrite(report: Report, store: BlobStore, blob_id: str) -> None:
    """The blob store must refuse a second put under the same name."""
    try:
        store.put(blob_id, b"other", ttl_days=1)
    except InvalidError:
        report.ok("blob overwrite", "refused, as it should be")
    except StatemgrError as error:
        report.note("blob overwrite", error.message, error.hint)
    else:
        detail = "not refused: the server has no conditional PUTs, so that only unique names protect blobs"
        report.note("blob overwrite", detail)
