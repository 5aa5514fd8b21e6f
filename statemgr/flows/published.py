"""What one owner knows to be published, and whether it may continue from that.

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
from statemgr.errors import FencedError, MissingError, OutcomeUnknownError, PermissionNeeded, StatemgrError
from statemgr.flows.checkpoint_records import sequences
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Layout
from statemgr.model.permissions import Permit
from statemgr.phases import Phase, announce
from statemgr.ports import CheckpointLog, Publisher


def always() -> bool:
    """Nobody takes the task away."""
    return True


@dataclass
class Published:
    """The records on the topic of the tasks that one publisher covers. Only :func:`publish` and :func:`settle` change
    it.

    ``pending``: the records of a publish that was sent but not answered; until it is settled, only :func:`settle`
    helps. ``fence_others`` fences the other kind of owner again, when the own ID was initialised once more;
    ``still_owned`` is asked before that. ``serdes``: store → labels of its serdes, where they are not those of the
    configuration. ``permits``: one-shot permissions that the opening was given, which the first publish uses up.
    ``job_records``: the sequence numbers of the job records on the topic, for a publisher of several
    tasks.
    """

    records: dict[str, CheckpointRecord | None]
    epoch: int
    layout: Layout
    fence_others: Callable[[], None]
    still_owned: Callable[[], bool] = always
    serdes: dict[str, tuple[str, str]] = field(default_factory=dict)
    pending: dict[str, CheckpointRecord] = field(default_factory=dict)
    job_records: set[int] = field(default_factory=set)
    permits: tuple[Permit, ...] = ()

    @property
    def newest_sequence(self) -> int:
        """The highest published sequence number of these tasks; 0 if there is none."""
        return max((*self.job_records, *(r.current.sequence for r in self.records.values() if r)), default=0)

    def acknowledge(self, records: Mapping[str, CheckpointRecord]) -> None:
        """Make these records the published ones."""
        self.pending, self.permits = {}, ()
        self.records.update(records)
        if len(self.records) > 1:
            of_publish = {record.current.sequence for record in records.values()}
            self.job_records = (self.job_records | of_publish) & sequences(self.records)

    def checkpoint(self, task: str) -> Checkpoint | None:
        record = self.records[task]
        return record.current if record else None

    def older(self, task: str) -> Sequence[Checkpoint]:
        """The retained checkpoints except the current one, newest first."""
        record = self.records[task]
        return record.checkpoints[1:] if record else ()


def go_on(services: Services, publisher: Publisher, log: CheckpointLog, published: Published) -> None:
    """Before a publish: make sure that this owner has the ID, and that the topic says what it knows. Costs no request
    after a successful commit.

    Raises: FencedError if another owner has published meanwhile; RetryableError if that cannot be found out yet.
    """
    publisher.settle()
    if publisher.regained:
        _regain(services, publisher, log, published, published.records)
        confirm(services, log, published)
        publisher.confirmed()


def confirm(services: Services, log: CheckpointLog, published: Published) -> None:
    """Read the topic, and check that it says what this owner knows.

    Raises: FencedError if another owner has published; RetryableError if that cannot be found out yet.
    """
    _outcome(services, published, log.read(tuple(published.records)), published.records)


@contextmanager
def explained(services: Services, log: CheckpointLog, published: Published) -> Iterator[None]:
    """A block that meets state: what it misses, or cannot explain, may be the work of an owner that came meanwhile.

    Raises: FencedError when that is why; else what the block raised.
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
    """Whether the topic says what is expected (True), or what was there before (False).

    Raises: FencedError if it says anything else, because then another owner has published.
    """
    outcomes = set()
    for task, ours in expected.items():
        now = _mark(found.get(task))
        if now not in (_mark(ours), _mark(published.records[task])):
            raise FencedError(
                f"another owner has published checkpoint {now and now[0]} in the meantime",
                hint="stop this process; the new owner processes what it did not publish",
                job=services.config.job_name,
                task=task,
            )
        outcomes.add(now == _mark(ours))
    if len(outcomes) > 1:
        raise FencedError(
            "another owner has published checkpoints of some of the tasks in the meantime",
            job=services.config.job_name,
            tasks=_names(expected),
        )
    return True in outcomes


def _mark(record: CheckpointRecord | None) -> tuple[str, int, int] | None:
    """What identifies a checkpoint."""
    current = record.current if record else None
    return (str(current.checkpoint_id), current.sequence, current.epoch) if current else None


def _names(tasks: Iterable[str]) -> str:
    return ", ".join(sorted(tasks))
