"""What is wrong with a job, in the words of ``docs/runbook.md``: the fault, the part at fault, and what was seen. Pure.

``statemgr top`` and ``statemgr ui`` show the same list. It is made from errors, from an overview of the job, and from
the reports of ``statemgr doctor``, ``gc`` and ``snapshots verify``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise

from statemgr.config import JobConfig
from statemgr.errors import (
    AccessDenied,
    CorruptBlob,
    CorruptRecord,
    DiskFull,
    MissingBlob,
    RetryableError,
    StatemgrError,
)
from statemgr.health.checks import CLOCK_TOLERANCE_MS, Report, Status
from statemgr.health.verify_blobs import Verified
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.terminal.output import describe

#: A task may be this many intervals of its commits late, and at least this many milliseconds.
_LATE_INTERVALS, _LATE_MS = 3, 10_000
#: The lag counts as growing if the task would need this long for it at its present speed.
_FAR_BEHIND_S = 30.0
#: A rate is that of this many milliseconds or more.
WINDOW_MS = 20_000
#: A lag grows steadily if each half of that time has more than this share of the growth.
_SHARE = 0.2
#: Problems of one kind that are listed one by one.
MOST = 5


class Fault(Enum):
    """The faults of the runbook, causes before effects. The value is the anchor of the section."""

    BROKER_GONE = "broker-gone"
    BLOB_STORE_GONE = "blob-store-gone"
    DISK_FULL = "disk-full"
    MISSING_RIGHTS = "missing-rights"
    CORRUPT_RECORD = "corrupt-record"
    TOPIC_DAMAGED = "topic-damaged"
    CORRUPT_BLOB = "corrupt-blob"
    WRONG_CLOCK = "wrong-clock"
    INPUT_HELD_UP = "input-held-up"
    MEMBER_STUCK = "member-stuck"
    LAG_GROWS = "lag-grows"
    BLOBS_ORPHANED = "blobs-orphaned"
    OTHER = "other-problems"

    @property
    def title(self) -> str:
        """The title of the section."""
        return self.value.replace("-", " ").capitalize()


_ORDER = {fault: place for place, fault in enumerate(Fault)}
#: Faults that can be the effect of another one.
_EFFECTS = frozenset({Fault.MEMBER_STUCK, Fault.LAG_GROWS})


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of the list.

    Attributes:
        part: the part at fault: an address, a bucket, a directory, a task, a partition and offset, a clock, a right.
        detail: what was seen, one or two sentences.
    """

    fault: Fault
    part: str
    detail: str


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Each fault of a part once, causes first; a long row of one kind is cut."""
    found: list[Problem] = []
    first: dict[tuple[Fault, str], Problem] = {}
    for problem in problems:
        first.setdefault((problem.fault, problem.part), problem)
    ordered = sorted(first.values(), key=lambda problem: _ORDER[problem.fault])
    for fault, same in groupby(ordered, key=lambda problem: problem.fault):
        several = list(same)
        found += several[:MOST]
        if len(several) > MOST:
            found.append(Problem(fault, f"{len(several) - MOST} more", "The first ones are listed above."))
    return found


def may_follow(problem: Problem, all_of_them: Collection[Problem]) -> bool:
    """Whether a problem may be the effect of another one in the list."""
    return problem.fault in _EFFECTS and any(other.fault not in _EFFECTS for other in all_of_them)


# --- errors and reports ------------------------------------------------------------------------------------------


def of_error(error: StatemgrError, config: JobConfig) -> Problem:
    """The fault behind an error. Secrets of the configuration are masked."""
    fault, part = _fault_of(error, config)
    hide = config.hider()
    return Problem(fault, hide(part), hide(describe(error)))


def _fault_of(error: StatemgrError, config: JobConfig) -> tuple[Fault, str]:
    where = error.where
    about_blobs = "bucket" in where or "blob" in where
    match error:
        case AccessDenied() if "RequestTimeTooSkewed" in error.message:
            return Fault.WRONG_CLOCK, "this machine's clock"
        case AccessDenied() if where.get("missing_right"):
            place = f" on {store_address(config)}" if about_blobs else ""
            return Fault.MISSING_RIGHTS, f"{where['missing_right']}{place}"
        case AccessDenied() if "correct blob.store.uri" in (error.hint or ""):
            return Fault.BLOB_STORE_GONE, store_address(config)
        case AccessDenied():
            part = str(where.get("path") or (store_address(config) if about_blobs else brokers(config)))
            return Fault.MISSING_RIGHTS, part
        case DiskFull():
            part = str(where.get("path") or (store_address(config) if about_blobs else config.state_dir))
            return Fault.DISK_FULL, part
        case CorruptRecord():
            return Fault.CORRUPT_RECORD, _record(where)
        case CorruptBlob() | MissingBlob():
            return Fault.CORRUPT_BLOB, str(where.get("blob", store_address(config)))
        case RetryableError() if about_blobs:
            return Fault.BLOB_STORE_GONE, store_address(config)
        case RetryableError():
            leaderless = "topic" in where and "no leader" in error.message
            return Fault.BROKER_GONE, _record(where) if leaderless else brokers(config)
    return Fault.OTHER, _record(where) if "topic" in where else str(next(iter(where.values()), config.job_key))


def _record(where: Mapping[str, object]) -> str:
    place = "-".join(str(where[name]) for name in ("topic", "partition") if name in where)
    return f"{place} offset {where['offset']}" if "offset" in where else place


def brokers(config: JobConfig) -> str:
    """The addresses that the job gives for its brokers."""
    return f"brokers {config.kafka_client('admin')['bootstrap.servers']}"


def store_address(config: JobConfig) -> str:
    """Where the blob store is: its URI, with the endpoint if one is set."""
    endpoint = config.get("blob.store.s3.endpoint") or config.get("blob.store.gcs.endpoint")
    return f"{config.blob_uri} at {endpoint}" if endpoint else str(config.blob_uri)


#: What a check of ``statemgr doctor`` is about, if it finds a problem without an error.
_BY_CHECK = {
    "clock": Fault.WRONG_CLOCK,
    "disk": Fault.DISK_FULL,
    "directory": Fault.MISSING_RIGHTS,
    "group": Fault.MISSING_RIGHTS,
    "topics": Fault.TOPIC_DAMAGED,
    "changelogs": Fault.TOPIC_DAMAGED,
    "backups": Fault.CORRUPT_BLOB,
    "input": Fault.INPUT_HELD_UP,
}


def of_report(report: Report, config: JobConfig, machine: str) -> Iterator[Problem]:
    """The problems that ``statemgr doctor`` found on a machine."""
    errors = {id(finding): error for finding, error in report.errors}
    for finding in report.findings:
        if finding.status is Status.PROBLEM:
            error = errors.get(id(finding))
            if error is not None:
                yield of_error(error, config)
            else:
                fault = _BY_CHECK.get(finding.check, Fault.OTHER)
                yield Problem(fault, f"{finding.check} on {machine}", config.hider()(finding.detail))


def of_verified(found: Verified) -> Iterator[Problem]:
    """The damaged blobs."""
    for one in (*found.damaged, *found.expiring):
        of = f" of {one.store}" if one.store else ""
        detail = f"{one.task} needs it for checkpoint {one.checkpoint_ids}{of}: {one.problem}."
        yield Problem(Fault.CORRUPT_BLOB, one.blob_id, detail)


# --- the checkpoints of the tasks ----------------------------------------------------------------------------------


def late_ms(record: CheckpointRecord, config: JobConfig) -> int:
    """How old the checkpoint of a task may become while messages wait (milliseconds)."""
    pair = closest(record)
    gap_ms = 0 if pair is None else published(pair[0]) - published(pair[1])
    return max(_LATE_INTERVALS * gap_ms, soonest_late_ms(config))


def soonest_late_ms(config: JobConfig) -> int:
    """The same for a task that commits every ``task.commit.ms``."""
    return max(_LATE_INTERVALS * config.commit_ms, _LATE_MS)


def closest(record: CheckpointRecord) -> tuple[Checkpoint, Checkpoint] | None:
    """The two retained checkpoints in a row, newer first, with the shortest time between them."""
    return min(pairwise(record.checkpoints), key=lambda two: published(two[0]) - published(two[1]), default=None)


def published(checkpoint: Checkpoint) -> int:
    """When a checkpoint was published, by the broker's clock if it is known (epoch milliseconds)."""
    return checkpoint.published_ms or checkpoint.checkpoint_id.millis


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a task moves through its input. ``lag``: messages that wait. Rates are messages per second."""

    lag: int
    arrive: float
    process: float

    @property
    def is_falling_behind(self) -> bool:
        """Whether more arrives than is processed, and there is much to catch up already."""
        return self.arrive > 1.1 * self.process > 0 and self.lag > _FAR_BEHIND_S * self.process


@dataclass(frozen=True, slots=True)
class Point:
    """The input of a task at one checkpoint: the time (epoch milliseconds), and the offsets that were processed and had
    arrived by then, summed over its source partitions."""

    at_ms: int
    processed: int
    arrived: int

    @property
    def lag(self) -> int:
        return self.arrived - self.processed


def recent(times: Sequence[int]) -> int:
    """How many ``times``, newest first, make a rate: three and more, over :data:`WINDOW_MS`. 0 if there are too few."""
    return next((n + 1 for n, at in enumerate(times) if n >= 2 and times[0] - at >= WINDOW_MS), 0)


def pace_of(points: Sequence[Point]) -> Pace | None:
    """The pace of a task whose lag grows steadily, and not only in one burst. None of any other.

    Args:
        points: newest first.
    """
    count = recent([point.at_ms for point in points])
    if not count:
        return None
    newest, middle, oldest = points[0], points[count // 2], points[count - 1]
    growth = middle.lag - oldest.lag, newest.lag - middle.lag
    if min(growth) <= _SHARE * sum(growth):
        return None
    window_s = (newest.at_ms - oldest.at_ms) / 1000
    arrive, process = newest.arrived - oldest.arrived, newest.processed - oldest.processed
    return Pace(newest.lag, arrive / window_s, process / window_s)


def of_pace(task: str, sources: Sequence[str], pace: Pace) -> Iterator[Problem]:
    """A lag that grows."""
    if pace.is_falling_behind:
        more = f" and {len(sources) - 2} more" if len(sources) > 2 else ""
        yield Problem(
            Fault.LAG_GROWS,
            f"{task}, which reads {', '.join(sources[:2])}{more}",
            f"{pace.lag:,} messages wait. {pace.arrive:,.0f} arrive each second, and the task processes "
            f"{pace.process:,.0f} in that time.",
        )


def of_clocks(record: CheckpointRecord, owner: str, now_ms: int, config: JobConfig) -> Iterator[Problem]:
    """Clocks that differ: the owner's from the broker's, and this machine's from the broker's."""
    current = record.current
    at_ms = current.published_ms
    if at_ms is None:
        return
    ahead_ms = current.checkpoint_id.millis - at_ms
    # a commit begins, by the owner's clock, before it is published by the broker's
    if ahead_ms > CLOCK_TOLERANCE_MS or -ahead_ms > config.commit_timeout_ms + CLOCK_TOLERANCE_MS:
        direction = "ahead of" if ahead_ms > 0 else "behind"
        yield Problem(
            Fault.WRONG_CLOCK,
            f"the clock of the owner of {record.task} ({owner})",
            f"It is {abs(ahead_ms) / 1000:.0f} s {direction} the broker's: checkpoint {current.checkpoint_id} says so.",
        )
    if at_ms - now_ms > CLOCK_TOLERANCE_MS:
        detail = f"The broker's clock was {(at_ms - now_ms) / 1000:.0f} s ahead of it at the newest checkpoint."
        yield Problem(Fault.WRONG_CLOCK, "this machine's clock", detail)
