"""What an owner has published, and whether it is still the owner.

If a commit was not answered, or the transactional ID was initialised again, the owner finds out in these steps:

1. end the open transaction with the same producer, which fences nobody
2. if the ID was regained, another owner may have had it in between: read the topic, and if another owner has published,
   give up before anybody is fenced
3. fence: initialise the own ID again if its producer cannot be used any more, and the IDs of the other kind of owner
4. read the topic to its end, and compare
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from statemgr.backends.services import Services
from statemgr.errors import (
    FencedError,
    InvalidError,
    MissingError,
    OutcomeUnknownError,
    PermissionNeeded,
    RetryableError,
    StatemgrError,
)
from statemgr.flows.checkpoint_records import sequences
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Layout
from statemgr.model.offers import OfferKey
from statemgr.model.permissions import Permit
from statemgr.phases import Phase, announce
from statemgr.ports import CheckpointLog, Publisher

#: Tries to settle a publish of a command; each has its own deadline.
_SETTLE_TRIES = 3


def always() -> bool:
    """The default of ``still_owned``: nobody takes the task away."""
    return True


@dataclass
class Published:
    """The records on the topic of the tasks that one publisher covers. Only a publish and :func:`settle` change it.

    Attributes:
        records: task → its newest record.
        fence_others: fences the other kind of owner again, after the own ID was initialised again.
        still_owned: whether the caller still has the tasks; called before ``fence_others``.
        serdes: store → labels of its serdes, if they are not those of the configuration; None if not known yet.
        pending: the records of a publish that was sent but not answered. :func:`settle` must come next.
        job_records: the sequence numbers of the job records on the topic, for a publisher of several tasks.
        permits: one-shot permissions of the opening, which the first publish uses up.
        offers: offers of first snapshots that the next publish deletes.
        kept: task → the checkpoints that it keeps from now on, if they are not those of its newest checkpoint.
        sequence: the highest sequence number that other layouts of the job have used.
        along: keys and values of further records that the first publish sends; None deletes a record.
        end: the offset after the last record of the newest publish on the topic, if it was acknowledged.
    """

    records: dict[str, CheckpointRecord | None]
    epoch: int
    layout: Layout
    fence_others: Callable[[], None]
    still_owned: Callable[[], bool] = always
    serdes: Mapping[str, tuple[str, str] | None] = field(default_factory=dict)
    pending: dict[str, CheckpointRecord] = field(default_factory=dict)
    job_records: set[int] = field(default_factory=set)
    permits: tuple[Permit, ...] = ()
    offers: tuple[OfferKey, ...] = ()
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sequence: int = 0
    along: tuple[tuple[bytes, bytes | None], ...] = ()
    end: int | None = None

    @property
    def newest_sequence(self) -> int:
        """The highest published sequence number of these tasks; 0 if there is none."""
        return max((self.sequence, *self.job_records, *(r.current.sequence for r in self.records.values() if r)))

    def acknowledge(self, records: Mapping[str, CheckpointRecord], end: int | None = None) -> None:
        """Make these records the published ones."""
        self.pending, self.permits, self.offers, self.kept, self.along, self.end = {}, (), (), {}, (), end
        self.records.update(records)
        if len(self.records) > 1:
            of_publish = {record.current.sequence for record in records.values()}
            self.job_records = (self.job_records | of_publish) & sequences(self.records)

    def checkpoint(self, task: str) -> Checkpoint | None:
        record = self.records[task]
        return record.current if record else None

    def kept_by(self, task: str) -> tuple[str, ...]:
        """The IDs of the checkpoints that the task's next checkpoint keeps."""
        record = self.records[task]
        if task in self.kept or record is None:
            return self.kept.get(task, ())
        there = {str(checkpoint.checkpoint_id) for checkpoint in record.checkpoints}
        return tuple(kept for kept in record.current.kept if kept in there)

    def older(self, task: str) -> Sequence[Checkpoint]:
        """The retained checkpoints except the current one, newest first."""
        record = self.records[task]
        return record.checkpoints[1:] if record else ()


def common_serdes(checkpoints: Iterable[Checkpoint]) -> dict[str, tuple[str, str]]:
    """Store → the serdes of its keys and values in these checkpoints of several tasks.

    Raises: InvalidError if they differ.
    """
    found: dict[str, tuple[str, str]] = {}
    for checkpoint in checkpoints:
        for store, serdes in checkpoint.serdes.items():
            if found.setdefault(store, serdes) != serdes:
                raise InvalidError(
                    "the tasks' checkpoints were written with different serdes",
                    hint="commit with every task, or choose checkpoints from after the change",
                    store=store,
                )
    return found


def check_ownership(services: Services, publisher: Publisher, log: CheckpointLog, published: Published) -> None:
    """Before a publish: check that this owner has the ID, and that the topic has what it published last. After a
    successful commit this costs no request.

    Raises: FencedError if another owner has published meanwhile; RetryableError if that cannot be found out yet.
    """
    publisher.settle()
    if publisher.regained:
        _regain(services, publisher, log, published, published.records)
        confirm(services, log, published)
        publisher.confirmed()


def confirm(services: Services, log: CheckpointLog, published: Published) -> None:
    """Check that the topic has what this owner published last. It is read only if something was written since.

    Raises: FencedError if another owner has published; RetryableError if that cannot be found out yet.
    """
    if published.end is None or not log.ends_at(published.end):
        _outcome(services, published, log.read(tuple(published.records)), published.records)


@contextmanager
def explained(services: Services, log: CheckpointLog, published: Published) -> Iterator[None]:
    """A block that reads state. If state is missing or unexpected, a newer owner may be the reason.

    Raises: FencedError if it is; otherwise the error of the block.
    """
    try:
        yield
    except (MissingError, PermissionNeeded):
        confirm(services, log, published)
        raise


def settle(services: Services, publisher: Publisher, log: CheckpointLog, published: Published) -> bool:
    """Find out whether a publish succeeded whose acknowledgement was lost, and update ``published``.

    Returns: whether it succeeded; if not, the old checkpoint stays current.

    Raises:
        FencedError: another owner took over.
        OutcomeUnknownError: it cannot be settled yet; delete nothing, and call again.
        MissingState: the checkpoint topic is gone.
    """
    pending = published.pending
    try:
        publisher.settle()
        if publisher.regained:
            _regain(services, publisher, log, published, pending)
        was_published = _outcome(services, published, log.read(tuple(pending)), pending)
        publisher.confirmed()
    except FencedError:
        published.pending = {}
        raise
    except MissingError:  # the topic is gone: asking again cannot help
        raise
    except StatemgrError as error:
        raise OutcomeUnknownError(
            f"the outcome of a publish is unknown and has not been settled yet: {error.message}",
            hint="commit again: the next commit settles it first",
            job=services.config.job_name,
        ) from error
    published.pending = {}
    if was_published:
        published.acknowledge(pending)
        announce(Phase.ACKNOWLEDGED, ", ".join(pending), services.config.job_key)
    return was_published


def settle_now(services: Services, publisher: Publisher, log: CheckpointLog, published: Published, what: str) -> None:
    """Settle a publish whose acknowledgement was lost, with a few tries. ``what`` was published, for the message.

    Raises: RetryableError if it was not published; FencedError; OutcomeUnknownError if it cannot be settled.
    """
    for left in reversed(range(_SETTLE_TRIES)):
        try:
            if settle(services, publisher, log, published):
                return
        except OutcomeUnknownError:
            if not left:
                raise
        else:
            raise RetryableError(
                f"{what} was not published, and the checkpoint before it is current",
                hint="run it again",
                job=services.config.job_name,
            )


def _regain(
    services: Services,
    publisher: Publisher,
    log: CheckpointLog,
    published: Published,
    expected: Mapping[str, CheckpointRecord | None],
) -> None:
    """Steps 2 and 3. Raises: FencedError, before it fences anybody, if this owner has already lost."""
    _outcome(services, published, log.read(tuple(expected), only_settled=True), expected)
    if not published.still_owned():
        raise FencedError(
            "the task was taken away from this process", job=services.config.job_name, tasks=_names(expected)
        )
    publisher.regain()
    published.fence_others()


def _outcome(
    services: Services,
    published: Published,
    found: Mapping[str, CheckpointRecord],
    expected: Mapping[str, CheckpointRecord | None],
) -> bool:
    """Whether the topic has the expected records (True) or the ones before them (False).

    Raises: FencedError if it has any others, because then another owner has published.
    """
    outcomes = set()
    for task, ours in expected.items():
        now = _fingerprint(found.get(task))
        if now not in (_fingerprint(ours), _fingerprint(published.records[task])):
            raise FencedError(
                f"another owner has published checkpoint {now and now[0]} in the meantime",
                hint="stop this process; the new owner processes what it did not publish",
                job=services.config.job_name,
                task=task,
            )
        outcomes.add(now == _fingerprint(ours))
    if len(outcomes) > 1:
        raise FencedError(
            "another owner has published checkpoints of some of the tasks in the meantime",
            job=services.config.job_name,
            tasks=_names(expected),
        )
    return True in outcomes


def _fingerprint(record: CheckpointRecord | None) -> tuple[str, int, int] | None:
    """What identifies a checkpoint."""
    current = record.current if record else None
    return (str(current.checkpoint_id), current.sequence, current.epoch) if current else None


def _names(tasks: Iterable[str]) -> str:
    return ", ".join(sorted(tasks))
