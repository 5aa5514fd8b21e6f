"""The transactional publisher: the only writer to Kafka. One ``transactional.id``, one transaction at a time.

What each failure means for the transaction is decided here:

- before the commit is asked for, everything that fails is surely not published: abort, RetryableError. The next
  transaction waits until the aborted one has ended in every partition: where one has no leader at that moment,
  Kafka 4.3.1 forgets it (KAFKA-20734), and would commit what is open there with the next transaction's records
- once it was asked for and no answer came, the outcome is unknown: the same producer is asked again, which
  both learns the outcome and notices a newer owner; only when it is beyond use, a new one of the ID is made
- fenced is fenced: no new producer is ever made then, since it would fence the newer owner in turn
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum

from confluent_kafka import KafkaError, KafkaException, Producer

from statemgr.config import JobConfig
from statemgr.errors import (
    ClosedError,
    FencedError,
    OutcomeUnknownError,
    RetryableError,
    StatemgrError,
    UnavailableError,
)
from statemgr.ids import task_path
from statemgr.kafka.clients import (
    SLICE_S,
    ClientErrors,
    is_fenced,
    is_unreachable,
    producer,
    translate,
    unmasked,
)
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.transaction import KafkaTransaction
from statemgr.ports import Clock

#: Brokers refuse more, unless their transaction.max.timeout.ms was raised.
_BROKER_LIMIT_MS = 900_000
#: Seconds that giving a transaction up may take; what is left of it is aborted before the next one begins.
_ABORT_TIMEOUT_S = 30.0
#: Seconds to get the ID; a coordinator that has just started answers after a few.
_FENCE_TIMEOUT_S = 60.0


def task_transactional_id(config: JobConfig, task: str) -> str:
    """The ID of the owner of one task."""
    return f"statemgr.{config.job_name}.{config.job_id}.{task_path(task)}"


def job_transactional_id(config: JobConfig) -> str:
    """The ID of the owner of a whole job (a Spark driver, the command line)."""
    return f"statemgr.{config.job_name}.{config.job_id}.job"


class _State(Enum):
    NEW = "not fenced yet"
    READY = "no transaction"
    OPEN = "a transaction is open"
    ABORTING = "a transaction must be aborted first"
    UNKNOWN = "a commit was asked for and not answered"
    UNUSABLE = "the producer cannot go on; its last transaction is settled by the next one of the ID"
    FENCED = "another owner has taken over"
    CLOSED = "closed"


class TransactionalPublisher:
    """Implements :class:`statemgr.ports.Publisher`; one thread at a time.

    Args:
        transactional_id: who this is to the brokers; a newer publisher of the same ID fences this one.
        clock: for deadlines.
    """

    def __init__(self, config: JobConfig, transactional_id: str, clock: Clock) -> None:
        self._config = config
        self._id = transactional_id
        self._clock = clock
        self._timeout_s = config.commit_timeout_ms / 1000
        self._errors = ClientErrors()
        self._producer: Producer | None = None
        self._state = _State.NEW
        #: Partitions with records of the last transaction, until it is known to be committed.
        self._written: set[tuple[str, int]] = set()

    # --- the port ---------------------------------------------------------------------------------------

    def fence(self) -> None:
        """Take the ID over. Raises: FencedError, UnavailableError, AccessDenied, ConfigError."""
        self._refuse(_State.CLOSED, _State.FENCED)
        fresh = self._make_producer()
        deadline = self._clock.monotonic() + min(_FENCE_TIMEOUT_S, self._timeout_s)
        with contextlib.suppress(KafkaException):
            # a client without a connection asks for its coordinator again only after 500 ms
            fresh.list_topics(self._config.checkpoint_topic, timeout=min(SLICE_S, self._timeout_s))
        try:
            self._until(fresh, fresh.init_transactions, deadline)
        except KafkaException as error:
            raise self._failure(error, "taking over the transactional ID") from error
        self._errors.clear()
        self._producer, self._state = fresh, _State.READY

    @contextlib.contextmanager
    def transaction(self) -> Iterator[KafkaTransaction]:
        """See :meth:`statemgr.ports.Publisher.transaction`. It has ``task.commit.timeout.ms`` in all."""
        deadline = self._clock.monotonic() + self._timeout_s
        current = self._begin(deadline)
        transaction = KafkaTransaction(current, self._clock, deadline, self._errors)
        self._written = transaction.written
        try:
            yield transaction
            transaction.flush()
        except KafkaException as error:
            raise self._given_up(self._failure(error, "publishing")) from error
        except StatemgrError as error:
            raise self._given_up(error) from error.__cause__
        except BaseException:
            self._abort()
            raise
        finally:
            transaction.close()
        self._commit(current, deadline)

    def settle(self) -> bool:
        """See :meth:`statemgr.ports.Publisher.settle`."""
        self._refuse(_State.CLOSED, _State.FENCED)
        if self._state is _State.UNKNOWN:
            assert self._producer is not None
            deadline = self._clock.monotonic() + self._timeout_s
            try:
                self._until(self._producer, self._producer.commit_transaction, deadline)
                self._state, self._written = _State.READY, set()
            except KafkaException as error:
                self._after_failed_commit(error)
                if self._state is _State.UNKNOWN:
                    raise self._failure(error, "settling a transaction") from error
                if self._state is _State.FENCED:
                    raise self._fenced() from error
        if self._state is _State.UNUSABLE:
            self.fence()
            return True
        return False

    def close(self) -> None:
        """Let the producer go; an open transaction is left to the next owner or to its timeout."""
        if self._producer is not None:
            with contextlib.suppress(KafkaException):
                self._producer.purge()
        self._producer = None
        self._state = _State.CLOSED

    # --- steps ------------------------------------------------------------------------------------------

    def _make_producer(self) -> Producer:
        return producer(
            self._config,
            self._errors,
            transactional_id=self._id,
            enable_idempotence=True,
            acks="all",
            transaction_timeout_ms=min(self._config.commit_timeout_ms, _BROKER_LIMIT_MS),
        )

    def _begin(self, deadline: float) -> Producer:
        self._refuse(_State.CLOSED, _State.FENCED, _State.NEW, _State.OPEN)
        if self._state is _State.UNKNOWN:
            raise OutcomeUnknownError(
                "the outcome of the last publish is unknown",
                hint="settle it first",
                transactional_id=self._id,
            )
        if self._state is _State.ABORTING:
            self._abort(min(deadline, self._clock.monotonic() + _ABORT_TIMEOUT_S))
        if self._state is _State.UNUSABLE:
            # a new producer of the ID would publish on what it remembers, over a newer owner's checkpoints
            raise FencedError(
                "the producer cannot go on",
                hint="open the task again: it reads the topic anew",
                transactional_id=self._id,
            )
        if self._state is not _State.READY:
            raise (
                self._fenced()
                if self._state is _State.FENCED
                else UnavailableError("the last transaction could not be aborted yet", transactional_id=self._id)
            )
        assert self._producer is not None
        self._await_aborted(deadline)
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            self._classify(error.args[0])
            raise self._failure(error, "beginning a transaction") from error
        self._state = _State.OPEN
        return self._producer

    def _await_aborted(self, deadline: float) -> None:
        """After an abort: no partition has the transaction open any more. Raises: UnavailableError, while one has."""
        if not self._written:
            return
        with contextlib.closing(TopicMetadata(self._config)) as metadata:
            metadata.await_stable(self._written, deadline - self._clock.monotonic())
        self._written = set()

    def _commit(self, current: Producer, deadline: float) -> None:
        self._state = _State.UNKNOWN
        try:
            self._until(current, current.commit_transaction, deadline)
        except KafkaException as error:
            self._after_failed_commit(error)
            if self._state is _State.FENCED:
                raise self._fenced() from error
            if self._state in (_State.READY, _State.ABORTING):
                raise RetryableError(
                    f"the transaction was aborted: {error.args[0].str()}", transactional_id=self._id
                ) from error
            raise OutcomeUnknownError(
                f"the broker has not answered the commit: {error.args[0].str()}",
                transactional_id=self._id,
                hint="settle it, then read the topic",
            ) from error
        self._state, self._written = _State.READY, set()
        self._errors.clear()

    def _after_failed_commit(self, error: KafkaException) -> None:
        """What a failed commit means: aborted (READY), FENCED, UNUSABLE, or still UNKNOWN."""
        reason = error.args[0]
        if is_fenced(reason) or self._fenced_reported():
            self._state = _State.FENCED
        elif reason.txn_requires_abort():
            self._abort()
        elif reason.fatal() or not is_unreachable(reason):
            self._state = _State.UNUSABLE

    def _abort(self, deadline: float | None = None) -> None:
        """Give the open transaction up; never raises. What cannot be aborted now is tried again later."""
        if self._producer is None:
            return
        self._state = _State.ABORTING
        until = deadline if deadline is not None else self._clock.monotonic() + _ABORT_TIMEOUT_S
        try:
            self._until(self._producer, self._producer.abort_transaction, until)
            self._state = _State.READY
        except KafkaException as error:
            self._classify(error.args[0])

    def _given_up(self, error: StatemgrError) -> StatemgrError:
        """Abort, and say what that showed: a fenced owner is fenced whatever went wrong first."""
        self._abort()
        if self._state is _State.FENCED and not isinstance(error, FencedError):
            return self._fenced()
        return error

    def _classify(self, error: KafkaError) -> None:
        if is_fenced(error) or self._fenced_reported():
            self._state = _State.FENCED
        elif error.fatal():
            self._state = _State.UNUSABLE

    def _fenced_reported(self) -> bool:
        fatal = self._errors.fatal()
        return fatal is not None and is_fenced(fatal)

    def _until(self, client: Producer, call: Callable[[float], None], deadline: float) -> None:
        """Repeat a call that librdkafka resumes, until it succeeds or the deadline has passed.

        Raises: KafkaException, the last one.
        """
        while True:
            left = deadline - self._clock.monotonic()
            try:
                with unmasked():
                    call(max(min(SLICE_S, left), 0.01))
                return
            except KafkaException as error:
                reason = self._served(client) or error.args[0]
                refused = self._errors.refused() is not None
                again = is_unreachable(reason) or reason.code() == KafkaError._FATAL  # the next call says which
                if not again or reason.fatal() or refused or left <= 0:
                    raise KafkaException(reason) from error
                if reason.code() != KafkaError._TIMED_OUT:
                    self._clock.sleep(min(0.1, max(left, 0.0)))

    def _served(self, client: Producer) -> KafkaError | None:
        """Let the client report what it has to; a fatal error comes as an exception."""
        try:
            with unmasked():
                client.poll(0)
        except KafkaException as error:
            found: KafkaError = error.args[0]
            return found
        return None

    # --- errors -----------------------------------------------------------------------------------------

    def _failure(self, error: KafkaException, doing: str) -> StatemgrError:
        found = translate(error.args[0], doing, reported=self._errors, transactional_id=self._id)
        if isinstance(found, FencedError):
            self._state = _State.FENCED
        return found

    def _fenced(self) -> FencedError:
        return FencedError(
            "another owner has taken over",
            hint="stop this one: what it did not publish is not lost",
            transactional_id=self._id,
        )

    def _refuse(self, *states: _State) -> None:
        if self._state not in states:
            return
        if self._state is _State.FENCED:
            raise self._fenced()
        raise ClosedError(f"the publisher cannot be used: {self._state.value}", transactional_id=self._id)
