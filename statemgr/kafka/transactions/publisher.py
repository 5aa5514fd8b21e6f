"""The transactional publisher: the only writer to Kafka. It has one ``transactional.id`` and one transaction at a time.

It decides what each failure means for the transaction:

- A failure before the commit request: the transaction is surely not published. The publisher aborts it and raises
  RetryableError. The next transaction waits until the aborted one has ended in every partition. Kafka 4.3.1 forgets a
  partition that has no leader during the abort (KAFKA-20734), and would commit the records that are open there together
  with those of the next transaction. If another producer's transaction hides whether it has ended, both have to end.
- No answer to the commit request: the outcome is unknown. The publisher asks the same producer again, which both learns
  the outcome and notices a newer owner. It makes a new producer with the ID only if the old one cannot be used any
  more.
- The brokers have forgotten the ID, because nobody used it for a week: an abort would then take the ID again inside the
  client, silently. So the publisher does not abort a transaction that failed for this reason (it is not open anywhere).
  After every other abort the ID is *regained*: the publisher publishes nothing until the owner has compared the topic
  with what it knows.
- A broker has refused a batch for good (its size, its time…): the client's sequence numbers are in doubt from then on
  (librdkafka 3575 and 3577), so after the abort the publisher takes a new producer, as if the ID was forgotten.
- Fenced: the publisher never makes a new producer, because that would fence the newer owner in turn. If the transaction
  was open for longer than its timeout, the publisher cannot know who fenced it, because brokers do that, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from confluent_kafka import KafkaError, KafkaException

from statemgr.config import JobConfig
from statemgr.errors import (
    NEW_OWNER,
    ClosedError,
    FencedError,
    OutcomeUnknownError,
    RetryableError,
    StatemgrError,
    UnavailableError,
)
from statemgr.ids import task_path, transactional_id
from statemgr.kafka.errors import FENCED, FORGOTTEN, ClientErrors, is_unreachable, translate
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.transactions.producer import KafkaTransaction, TransactionalProducer
from statemgr.kafka.transactions.refusals import Refusal, refused_place
from statemgr.ports import Clock, IdForgotten

#: Brokers refuse a longer timeout, unless their transaction.max.timeout.ms was raised.
_BROKER_LIMIT_MS = 900_000
#: Seconds that an abort may take; if it takes longer, it is finished before the next transaction begins.
_ABORT_TIMEOUT_S = 30.0
_LATE = "nothing is lost: the next commit first checks whether another owner has published in the meantime"
#: Seconds to get the ID. A coordinator that has just started needs a few.
_FENCE_TIMEOUT_S = 60.0


def task_transactional_id(config: JobConfig, task: str) -> str:
    """The transactional ID of the owner of one task."""
    return transactional_id(config.job_name, config.job_id, task_path(task))


def job_transactional_id(config: JobConfig) -> str:
    """The transactional ID of the owner of a whole job (a Spark driver, the command line)."""
    return transactional_id(config.job_name, config.job_id, "job")


class _State(Enum):
    NEW = "not fenced yet"
    READY = "no transaction"
    OPEN = "a transaction is open"
    ABORTING = "a transaction must be aborted first"
    UNKNOWN = "the broker has not answered a commit"
    UNUSABLE = "the producer cannot continue; the next producer with its ID ends its last transaction"
    FENCED = "another owner has taken over"
    CLOSED = "closed"


class TransactionalPublisher:
    """Implements :class:`statemgr.ports.Publisher`; one thread at a time.

    Args:
        transactional_id: a newer publisher with the same ID fences this one.
        clock: for deadlines.
        broker_ms: asks the brokers for their time (epoch milliseconds), for errors about it.
    """

    def __init__(
        self, config: JobConfig, transactional_id: str, clock: Clock, broker_ms: Callable[[], int] | None = None
    ) -> None:
        self._config = config
        self._id = transactional_id
        self._clock = clock
        self._broker_ms = broker_ms
        self._timeout_s = config.commit_timeout_ms / 1000
        self._transaction_timeout_ms = min(config.commit_timeout_ms, _BROKER_LIMIT_MS)
        self._errors = ClientErrors()
        self._producer: TransactionalProducer | None = None
        self._state = _State.NEW
        #: Partition → the first record of the last transaction there, until we know that it is committed.
        self._written: dict[tuple[str, int], int | None] = {}
        #: When the open transaction began, in seconds: by the clock of the process, and by that of the wall.
        self._began: tuple[float, float] | None = None
        self._regained = False
        #: A broker has refused a batch of this producer.
        self._in_doubt = False

    # --- the port ---------------------------------------------------------------------------------------

    def fence(self) -> None:
        """Also raises: AccessDenied, ConfigError."""
        self._refuse(_State.CLOSED, _State.FENCED)
        fresh = TransactionalProducer(self._config, self._id, self._clock, self._transaction_timeout_ms, self._errors)
        deadline = self._clock.monotonic() + min(_FENCE_TIMEOUT_S, self._timeout_s)
        try:
            fresh.init(deadline)
        except KafkaException as error:
            raise self._failure(error, "taking over the transactional ID") from error
        self._drop_producer()
        self._errors.clear()
        self._producer, self._state, self._in_doubt = fresh, _State.READY, False

    @contextlib.contextmanager
    def transaction(self) -> Iterator[KafkaTransaction]:
        """A transaction may take ``task.commit.timeout.ms`` in all."""
        deadline = self._clock.monotonic() + self._timeout_s
        current = self._begin(deadline)
        most = self._config.most_record_bytes
        transaction = KafkaTransaction(current.client, self._clock, deadline, self._errors, most)
        self._written = transaction.written
        try:
            yield transaction
            transaction.flush()
        except KafkaException as error:
            raise self._given_up(error, self._translated(error.args[0], "publishing"), transaction) from error
        except StatemgrError as error:
            raise self._given_up(error.__cause__, error, transaction) from error.__cause__
        except BaseException:
            self._abort()
            raise
        finally:
            transaction.close()
        self._commit(current, deadline, transaction)

    @property
    def regained(self) -> bool:
        return self._regained or self._state is _State.UNUSABLE

    def settle(self) -> None:
        self._refuse(_State.CLOSED, _State.FENCED)
        deadline = self._clock.monotonic() + self._timeout_s
        if self._state is _State.UNKNOWN:
            assert self._producer is not None
            try:
                self._producer.commit(deadline)
                self._state, self._written, self._began = _State.READY, {}, None
            except KafkaException as error:
                self._after_failed_commit(error)
                if self._state is _State.UNKNOWN:
                    raise self._failure(error, "settling a transaction") from error
        if self._state is _State.ABORTING:
            self._abort(min(deadline, self._clock.monotonic() + _ABORT_TIMEOUT_S))
        if self._state is _State.FENCED:
            raise self._fenced()
        if self._state is _State.ABORTING:
            raise UnavailableError("the last transaction has not been aborted yet", transactional_id=self._id)

    def regain(self) -> None:
        self._regained = True
        if self._state is _State.UNUSABLE:
            self.fence()

    def confirmed(self) -> None:
        self._refuse(_State.CLOSED, _State.FENCED, _State.UNUSABLE)
        self._regained = False

    def close(self) -> None:
        """Close the producer. An open transaction is left to the next owner or to its timeout."""
        self._drop_producer()
        self._state = _State.CLOSED

    # --- steps ------------------------------------------------------------------------------------------

    def _drop_producer(self) -> None:
        if self._producer is not None:
            self._producer.close()
        self._producer = None

    def _begin(self, deadline: float) -> TransactionalProducer:
        self._refuse(_State.CLOSED, _State.FENCED, _State.NEW, _State.OPEN)
        if self._state is _State.UNKNOWN:
            raise OutcomeUnknownError(
                "the outcome of the last publish is unknown",
                hint="commit again: the next commit finds out first whether the last one was published",
                transactional_id=self._id,
            )
        if self._state is not _State.READY or self._regained:
            raise RetryableError(
                "the transactional ID was taken over again: the owner must first compare its state with the topic",
                hint="commit again",
                transactional_id=self._id,
            )
        assert self._producer is not None
        self._await_aborted(deadline)
        self._began = self._now_s()
        try:
            self._producer.begin()
        except KafkaException as error:
            self._ended(error.args[0])
            raise self._failure(error, "beginning a transaction") from error
        self._state = _State.OPEN
        return self._producer

    def _await_aborted(self, deadline: float) -> None:
        """After an abort, wait until no partition has the transaction open. It takes half of the time at most, so that
        the commit does not count as one that hangs. Raises: TransactionOpen if one may still have it."""
        if not self._written:
            return
        with TopicMetadata(self._config, self._clock) as metadata:
            metadata.await_ended(self._written, (deadline - self._clock.monotonic()) / 2)
        self._written = {}

    def _commit(self, current: TransactionalProducer, deadline: float, transaction: KafkaTransaction) -> None:
        was_late = self._timed_out()
        self._state = _State.UNKNOWN
        try:
            current.commit(deadline)
        except KafkaException as error:
            reason = error.args[0]
            refusal = self._refusal(reason, transaction) if reason.txn_requires_abort() else None
            self._after_failed_commit(error)
            if refusal is not None and self._state in (_State.UNUSABLE, _State.ABORTING):
                raise self._explained(refusal) from error
            if self._state is _State.FENCED:
                raise self._fenced() from error
            if self._state in (_State.READY, _State.ABORTING):
                raise RetryableError(
                    f"the transaction was aborted: {reason.str()}", transactional_id=self._id
                ) from error
            if was_late or (self._state is _State.UNUSABLE and self._timed_out()):
                raise OutcomeUnknownError(self._late(), hint=_LATE, transactional_id=self._id) from error
            raise OutcomeUnknownError(
                f"the broker has not answered the commit: {reason.str()}",
                transactional_id=self._id,
                hint="settle it, then read the topic",
            ) from error
        self._state, self._written, self._began = _State.READY, {}, None
        self._errors.clear()

    def _after_failed_commit(self, error: KafkaException) -> None:
        """Decide the state after a failed commit: aborted (READY), FENCED, UNUSABLE, or still UNKNOWN."""
        reason = error.args[0]
        if self._ended(reason):
            return
        if reason.code() in FORGOTTEN or not (reason.txn_requires_abort() or is_unreachable(reason)):
            self._state = _State.UNUSABLE
        elif reason.txn_requires_abort():
            self._abort()

    def _abort(self, deadline: float | None = None) -> None:
        """Abort the open transaction. Never raises; an abort that fails is tried again later."""
        if self._producer is None:
            return
        self._state, self._regained = _State.ABORTING, True
        try:
            self._producer.abort(deadline or self._clock.monotonic() + _ABORT_TIMEOUT_S)
            self._state, self._began = _State.UNUSABLE if self._in_doubt else _State.READY, None
        except KafkaException as error:
            self._ended(error.args[0])

    def _refusal(self, reason: KafkaError, transaction: KafkaTransaction) -> Refusal | None:
        """What a broker has refused; None if ``reason`` is about something else. Then the producer is in doubt."""
        place = refused_place(reason, transaction.refused)
        if place is None:
            return None
        self._in_doubt = True
        return Refusal(reason, *place, lambda: transaction.largest(*place), transaction.times.get(place[0]))

    def _explained(self, refusal: Refusal) -> StatemgrError:
        found = refusal.explained(self._config, self._clock, self._broker_ms)
        return found or self._translated(refusal.error, "publishing", topic=refusal.topic)

    def _given_up(
        self, cause: BaseException | None, error: StatemgrError, transaction: KafkaTransaction
    ) -> StatemgrError:
        """Abort, and return the error to raise: FencedError if the abort shows that this owner is fenced, else
        ``error``."""
        asked: KafkaError | None = cause.args[0] if isinstance(cause, KafkaException) else None
        reason = asked
        if asked is not None and self._producer is not None:
            reason = self._producer.reason(asked)
        if reason is not None and reason.code() in FORGOTTEN:
            self._state, self._began = _State.UNUSABLE, None
            return IdForgotten(
                f"the brokers have forgotten the transactional ID: {reason.str()}",
                hint="commit again; the ID was unused for longer than transactional.id.expiration.ms of the brokers",
                transactional_id=self._id,
            )
        refusal = self._refusal(reason, transaction) if reason is not None else None
        self._abort()
        if self._state is _State.FENCED:
            return error if isinstance(error, FencedError) else self._fenced()
        if self._state is _State.UNUSABLE and self._timed_out():
            return RetryableError(self._late(), hint=_LATE, transactional_id=self._id)
        if refusal is not None:
            return self._explained(refusal)
        if reason is None or reason is asked:
            return error.with_where(transactional_id=self._id) if reason else error
        return self._translated(reason, "publishing")

    def _ended(self, error: KafkaError) -> bool:
        """Whether the producer cannot continue: it is fenced, or its error is fatal."""
        fatal = self._errors.fatal()
        if error.code() in FENCED or (fatal is not None and fatal.code() in FENCED):
            # after its timeout, the brokers may have fenced the transaction themselves
            self._state = _State.UNUSABLE if self._timed_out() else _State.FENCED
            return True
        if error.fatal():
            self._state = _State.UNUSABLE
        return bool(error.fatal())

    def _timed_out(self) -> bool:
        return self._age_s() * 1000 >= self._transaction_timeout_ms

    def _age_s(self) -> float:
        """Seconds for which the transaction has been open, by the clock that says more: one of them stops while the
        machine is suspended, and people can set the other one."""
        if self._began is None:
            return -1.0
        return max(abs(now - began) for now, began in zip(self._now_s(), self._began, strict=True))

    def _now_s(self) -> tuple[float, float]:
        return self._clock.elapsed(), self._clock.time_ns() / 1e9

    # --- errors -----------------------------------------------------------------------------------------

    def _failure(self, error: KafkaException, doing: str) -> StatemgrError:
        found = self._translated(error.args[0], doing)
        if isinstance(found, FencedError):
            self._state = _State.FENCED
        return found

    def _translated(self, error: KafkaError, doing: str, **more: str | int) -> StatemgrError:
        where: dict[str, str | int] = {"transactional_id": self._id, **more}
        if "topic" not in where and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED and self._written:
            # the client does not say which partition of the transaction
            where["topic"] = " or ".join(sorted({topic for topic, _ in self._written}))
        return translate(error, doing, reported=self._errors, **where)

    def _late(self) -> str:
        return (
            f"the transaction was open for {self._age_s():.0f} s, and its timeout is "
            f"{self._transaction_timeout_ms / 1000:g} s (task.commit.timeout.ms), after which the brokers abort it: "
            "this process was suspended, or much too slow"
        )

    def _fenced(self) -> FencedError:
        return FencedError(
            "another owner has taken over",
            hint=NEW_OWNER,
            transactional_id=self._id,
        )

    def _refuse(self, *states: _State) -> None:
        if self._state not in states:
            return
        if self._state is _State.FENCED:
            raise self._fenced()
        raise ClosedError(f"the publisher cannot be used: {self._state.value}", transactional_id=self._id)


def publish_alone(
    config: JobConfig, clock: Clock, name: str, topic: str, records: Iterable[tuple[bytes | None, bytes | None]]
) -> None:
    """Write records (key, value) to partition 0 of a topic in one transaction, without fencing an owner of the job.

    ``name``: for the transactional ID; no owner has it. Raises: as :class:`TransactionalPublisher`.
    """
    publisher = TransactionalPublisher(config, transactional_id(config.job_name, config.job_id, name), clock)
    try:
        publisher.fence()
        with publisher.transaction() as transaction:
            for key, value in records:
                transaction.send(topic, key, value, partition=0)
    finally:
        publisher.close()
