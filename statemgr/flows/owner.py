"""The owner of a task, or of a whole job: takes it over, and finds out whether it still has it and what is published.

:meth:`Owner.take` fences older owners: it initialises the own transactional ID first, and then the IDs of the other
kind of owner that covers the same tasks. (``open_job`` reads what is published, and ``publish`` publishes.)

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
from types import TracebackType
from typing import Self

from statemgr.errors import (
    NEW_OWNER,
    FencedError,
    MissingError,
    OutcomeUnknownError,
    PermissionNeeded,
    RetryableError,
    StatemgrError,
)
from statemgr.flows.published import Published
from statemgr.ids import task_name
from statemgr.kafka.topics import newest_lost
from statemgr.kafka.transactions.publisher import TransactionalPublisher, job_transactional_id, task_transactional_id
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.phases import Phase, announce
from statemgr.ports import CheckpointLog, Publisher
from statemgr.services import Services

#: Tries to settle a publish of a command; each has its own deadline.
_SETTLE_TRIES = 3
#: Calls at a time that spend almost all of their time waiting for the broker.
WAITING_AT_ONCE = 32


def always() -> bool:
    """The default of ``still_owned``: nobody takes the task away."""
    return True


class Owner:
    """Who may publish for one task, or for all tasks of a job, until :meth:`close`. Use it in a ``with`` block. Only
    one thread at a time may publish. A fenced owner stays fenced.

    Args:
        others: the transactional IDs of the other kind of owner.
        of_job: whether it has the whole job.

    Attributes:
        log: the checkpoint topic. An operation may look at it in its own way.
        published: what is published for each task.
        process: this process, for the checkpoints that it publishes; None if the configuration withholds it.
        still_owned: whether the caller still has the tasks; asked before the IDs are initialised again.
    """

    published: Published

    def __init__(
        self,
        services: Services,
        log: CheckpointLog,
        publisher: Publisher,
        others: Sequence[str] = (),
        *,
        of_job: bool = False,
    ) -> None:
        self.services = services
        self.of_job = of_job
        self.log = log
        self.process = services.owner
        self.publisher = publisher
        self.still_owned: Callable[[], bool] = always
        self._others = others
        self._fenced: FencedError | None = None

    @classmethod
    def take(
        cls,
        services: Services,
        log: CheckpointLog,
        task: str | None = None,
        *,
        tasks: int | None = None,
        fence_others: bool = True,
    ) -> Owner:
        """Take over one task; or the whole job, without ``task``.

        Args:
            tasks: how many tasks the job has, if another layout may have more than the configuration says.
            fence_others: whether to fence the other kind of owner, too; if not, the caller does so next.

        Raises: FencedError, UnavailableError, AccessDenied.
        """
        config, job_id = services.config, job_transactional_id(services.config)
        task_ids = [task_transactional_id(config, task_name(number)) for number in range(tasks or config.tasks)]
        others = [job_id] if task is not None else task_ids
        owner = cls(services, log, _own_publisher(services, task), others, of_job=task is None)
        try:
            if fence_others:
                owner.fence_others()
        except BaseException:
            owner.close()
            raise
        return owner

    def fence_others(self) -> None:
        """Fence the other kind of owner. Raises: UnavailableError, AccessDenied."""
        fence_ids(self.services, self._others)

    @property
    def is_fenced(self) -> bool:
        """Whether another owner has taken over, as far as this one knows."""
        return self._fenced is not None

    def fenced_by(self, error: FencedError) -> None:
        """Remember that another owner has taken over."""
        self._fenced = error

    @contextmanager
    def owned(self) -> Iterator[None]:
        """A block that only the owner runs. Raises: FencedError if the owner was fenced before or in the block."""
        if self._fenced is not None:
            raise self._fenced
        try:
            yield
        except FencedError as error:
            self._fenced = error
            raise

    def check(self) -> None:
        """Before a publish: check that this owner has the ID, and that the topic has what it published last. After a
        successful commit this costs no request.

        Raises: FencedError if another owner has published meanwhile; RetryableError if that cannot be found out yet.
        """
        self.publisher.settle()
        if self.publisher.regained:
            self._regain(self.published.records)
            self.confirm()
            self.publisher.confirmed()

    def confirm(self) -> None:
        """Check that the topic has what this owner published last. It is read only if something was written since.

        Raises: FencedError if another owner has published; RetryableError if that cannot be found out yet.
        """
        if self.published.end is None or not self.log.ends_at(self.published.end):
            self._compare_last()

    def _compare_last(self) -> None:
        self._outcome(self.log.read(tuple(self.published.records)), self.published.records)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """A block that reads state. If state is missing or unexpected, a newer owner may be the reason.

        Raises: FencedError if it is; otherwise the error of the block.
        """
        try:
            yield
        except (MissingError, PermissionNeeded):
            self.confirm()
            raise

    def settle(self) -> bool:
        """Find out whether a publish succeeded whose acknowledgement was lost, and update ``published``.

        Returns: whether it succeeded; if not, the old checkpoint stays current.

        Raises:
            FencedError: another owner took over.
            OutcomeUnknownError: it cannot be settled yet; delete nothing, and call again.
            MissingState: the checkpoint topic is gone.
        """
        pending, job = self.published.pending, self.services.config
        try:
            self.publisher.settle()
            if self.publisher.regained:
                self._regain(pending)
            was_published = self._outcome(self.log.read(tuple(pending)), pending)
            self.publisher.confirmed()
        except FencedError:
            self.published.pending = {}
            raise
        except MissingError:  # the topic is gone: asking again cannot help
            raise
        except StatemgrError as error:
            raise OutcomeUnknownError(
                f"the outcome of a publish is unknown and has not been settled yet: {error.message}",
                hint="commit again: the next commit settles it first",
                job=job.job_name,
            ) from error
        self.published.pending = {}
        if was_published:
            self.published.acknowledge(pending)
            announce(Phase.ACKNOWLEDGED, ", ".join(pending), job.job_key)
        return was_published

    def settle_now(self, what: str) -> None:
        """Settle a publish whose acknowledgement was lost, with a few tries. ``what`` was published, for the message.

        Raises: RetryableError if it was not published; FencedError; OutcomeUnknownError if it cannot be settled.
        """
        for left in reversed(range(_SETTLE_TRIES)):
            try:
                if self.settle():
                    return
            except OutcomeUnknownError:
                if not left:
                    raise
            else:
                raise RetryableError(
                    f"{what} was not published, and the checkpoint before it is current",
                    hint="run it again",
                    job=self.services.config.job_name,
                )

    def taken_over(self, error: FencedError) -> FencedError:
        """The error of a fenced owner, with the process that took over, if it has published already."""
        try:
            self._compare_last()
        except FencedError as found:
            return found
        except StatemgrError:
            pass  # the error that is known already says what to do
        return error

    def close(self) -> None:
        """Release the transactional ID."""
        self.publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _regain(self, expected: Mapping[str, CheckpointRecord | None]) -> None:
        """Steps 2 and 3. Raises: FencedError, before it fences anybody, if this owner has already lost."""
        found, known = self.log.read(tuple(expected), only_settled=True), self.published.checkpoints
        # an open transaction of somebody else may hide this owner's newest records; later, all of them are read
        hidden = {task for task in known if task not in found or _is_older(found[task].current, known[task])}
        if hidden or not found.keys() >= expected.keys():
            self._check_layout()
        self._outcome(found, {task: ours for task, ours in expected.items() if task not in hidden})
        if not self.still_owned():
            raise FencedError(
                "the task was taken away from this process", job=self.services.config.job_name, tasks=_names(expected)
            )
        self.publisher.regain()
        self.fence_others()

    def _check_layout(self) -> None:
        """Raises: FencedError if a newer layout was read, whose tasks are others: then nothing hides this owner's."""
        newest = max((record.layout.generation for record in self.log.current().values()), default=0)
        if newest > self.published.layout.generation:
            raise FencedError(
                f"the job was rescaled in the meantime: its layout has generation {newest}, and this owner has "
                f"{self.published.layout.generation}",
                hint=NEW_OWNER,
                job=self.services.config.job_name,
                tasks=_names(self.published.records),
            )

    def _outcome(self, found: Mapping[str, CheckpointRecord], expected: Mapping[str, CheckpointRecord | None]) -> bool:
        """Whether the topic has the expected records (True) or the ones before them (False).

        Raises: FencedError if it has any others, because then another owner has published; MissingState if it has older
            ones of these.
        """
        outcomes, job = set(), self.services.config.job_name
        for task, ours in expected.items():
            now = _fingerprint(found.get(task))
            known = self.published.records[task]
            if now not in (_fingerprint(ours), _fingerprint(known)):
                if now is None:
                    self._check_layout()
                if known is not None:
                    self._refuse_loss(found.get(task), known.current)
                raise FencedError(
                    f"{self._name(found.get(task))} has published checkpoint {now and now[0]} in the meantime",
                    hint=NEW_OWNER,
                    job=job,
                    task=task,
                )
            outcomes.add(now == _fingerprint(ours))
        if len(outcomes) > 1:
            raise FencedError(
                "another owner has published checkpoints of some of the tasks in the meantime",
                job=job,
                tasks=_names(expected),
            )
        return True in outcomes

    def _refuse_loss(self, found: CheckpointRecord | None, known: Checkpoint) -> None:
        """Raises: MissingState if the topic has an older checkpoint than a known one, or none of the job at all."""
        what = None
        if found is None:
            if not self.log.read():  # otherwise another owner has given the job other tasks
                what = "no checkpoint is left"
        elif _is_older(found.current, known):
            what = f"{found.current.checkpoint_id} is the newest again, and {known.checkpoint_id} is gone"
        if what is not None:
            raise newest_lost(self.services.config.checkpoint_topic, what)

    def _name(self, record: CheckpointRecord | None) -> str:
        """The process that published a record, and how long ago by the clocks of the broker and of this machine."""
        if record is None or record.current.owner is None:
            return "another owner"
        published_ms = record.current.published_ms or record.current.checkpoint_id.millis
        age_s = max(self.services.clock.time_ns() // 1_000_000 - published_ms, 0) / 1000
        return f"another owner ({record.current.owner}, {age_s:.0f} s ago)"


def _own_publisher(services: Services, task: str | None) -> TransactionalPublisher:
    """The publisher of a task, or of the whole job, after it has fenced older owners of the same kind.

    Raises: FencedError, UnavailableError, AccessDenied.
    """
    config, clock = services.config, services.clock
    own = job_transactional_id(config) if task is None else task_transactional_id(config, task)
    publisher = TransactionalPublisher(config, own, clock, lambda: services.changelog().time_ms())
    announce(Phase.FENCE, task or config.job_name, config.job_key)
    try:
        publisher.fence()
    except BaseException:
        publisher.close()
        raise
    return publisher


def fence_ids(services: Services, transactional_ids: Sequence[str]) -> None:
    """Initialise other owners' transactional IDs, and release them. Raises: UnavailableError, AccessDenied."""

    def fence_one(transactional_id: str) -> None:
        other = TransactionalPublisher(services.config, transactional_id, services.clock)
        try:
            other.fence()
        finally:
            other.close()

    services.in_parallel("fence", fence_one, transactional_ids, WAITING_AT_ONCE)


def _fingerprint(record: CheckpointRecord | None) -> tuple[str, int, int] | None:
    """What identifies a checkpoint."""
    current = record.current if record else None
    return (str(current.checkpoint_id), current.sequence, current.epoch) if current else None


def _is_older(found: Checkpoint, known: Checkpoint) -> bool:
    """Whether a checkpoint was published before a known one: each owner has a higher epoch than those before it."""
    return found.epoch <= known.epoch and found.sequence < known.sequence


def _names(tasks: Iterable[str]) -> str:
    return ", ".join(sorted(tasks))
