"""Names of the steps of commit and restore, and how to observe them.

Flows announce each step before they take it. Metrics, progress bars, the demo and the crash tests observe them.
An observer runs on the thread of the flow, and an exception in it is raised there.

A :class:`Flow` is one whole commit, publish, restore or snapshot, with a beginning, an end and attributes. Traces are
made from flows and the steps in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import lru_cache
from typing import Protocol


class Phase(StrEnum):
    """A step that a flow is about to take."""

    # restore, in order
    FENCE = "restore.fence"
    READ_TOPIC = "restore.read-topic"
    PLAN = "restore.plan"
    GET_INDEX = "restore.get-index"
    FETCH = "restore.fetch"
    REPLAY = "restore.replay"
    APPLY_SEGMENTS = "restore.apply-segments"
    VERIFY = "restore.verify"
    SWAP = "restore.swap"
    OPEN = "restore.open"
    # commit, in order
    FLUSH = "commit.flush"
    CHECKPOINT_DIR = "commit.checkpoint-dir"
    DIFF = "commit.diff"
    UPLOAD = "commit.upload"
    PUT_INDEX = "commit.put-index"
    PUT_SEGMENTS = "commit.put-segments"
    PREPARED = "commit.prepared"
    BEGIN = "publish.begin"
    SEND_CHANGELOG = "publish.send-changelog"
    SEND_CHECKPOINT = "publish.send-checkpoint"
    COMMIT_TRANSACTION = "publish.commit-transaction"
    ACKNOWLEDGED = "publish.acknowledged"
    REMOVE_TTL = "clean-up.remove-ttl"
    DELETE_BLOBS = "clean-up.delete-blobs"
    DELETE_INDEX = "clean-up.delete-index"
    CLEANED_UP = "clean-up.done"
    # in the background, next to commits, or while a task is closed
    LOCAL_COPY = "commit.local-copy"
    MATERIALIZE = "materialize.begin"
    MATERIALIZED = "materialize.done"
    OUTPUT = "output.write"
    # a first snapshot that is built next to a running job, and its owner, who begins with it
    OFFER = "materialize.offer"
    ADOPT_OFFER = "restore.adopt-offer"
    # an adoption, for each partition of a changelog, and after each of its transactions
    COPY = "adopt.copy"
    COPIED = "adopt.copied"
    # a rescale, for each store and group of tasks
    SPLIT = "rescale.split"
    MAKE_STORES = "rescale.make-stores"
    STORE = "rescale.store"
    STORED = "rescale.stored"
    # for what the job has committed since
    CATCH_UP = "rescale.catch-up"
    # a copy of a job, for each blob
    COPY_BLOB = "copy.blob"


Observer = Callable[[Phase, str], None]
#: Observers, each with the job that it observes (None: all jobs).
_observers: list[tuple[Observer, str | None]] = []


def announce(phase: Phase, subject: str, job: str) -> None:
    """Call the observers of a job before a step.

    Args:
        subject: a task, ``task/store``, several tasks (``, `` between them), or the job's name for the whole job.
        job: ``<name>/<ID>`` of the job.
    """
    for observer, wanted in tuple(_observers):
        if wanted is None or wanted == job:
            observer(phase, subject)


@lru_cache(maxsize=4096)
def tasks_of(subject: str) -> tuple[str, ...]:
    """The tasks in the subject of a step; none for a step of the whole job."""
    names = (name.partition("/")[0] for name in subject.split(", "))
    return tuple(name for name in names if name.startswith("Partition "))


def add_observer(observer: Observer, job: str | None = None) -> None:
    """Call ``observer(phase, subject)`` before each step of a job in this process (None: of all jobs)."""
    _observers.append((observer, job))


def remove_observer(observer: Observer) -> None:
    """Stop calling an observer. Raises: ValueError if it was not added."""
    for entry in _observers:
        if entry[0] == observer:
            _observers.remove(entry)
            return
    raise ValueError("no such observer")


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Observe inside a ``with`` block."""
    add_observer(observer)
    try:
        yield
    finally:
        remove_observer(observer)


# --- whole flows -----------------------------------------------------------------------------------------------------


class Flow:
    """A commit, publish, restore or snapshot that has begun. :meth:`end` it exactly once; further calls do nothing.

    Attributes:
        name: ``commit``, ``publish``, ``restore`` or ``snapshot``.
        subject: as in :func:`announce`.
        job: ``<name>/<ID>`` of the job.
        attributes: what is known at the end, such as ``checkpoint`` and ``bytes``.
    """

    def __init__(self, name: str, subject: str, job: str) -> None:
        self.name = name
        self.subject = subject
        self.job = job
        self.attributes: dict[str, str | int] = {}
        self._observers = [one for one, wanted in tuple(_flow_observers) if wanted is None or wanted == job]
        for observer in self._observers:
            observer.began(self)

    def end(self, error: BaseException | None = None) -> None:
        """The flow has ended, with or without an error."""
        observers, self._observers = self._observers, []
        for observer in observers:
            observer.ended(self, error)

    @contextmanager
    def here(self) -> Iterator[Flow]:
        """The steps that this thread announces in the block belong to the flow. An error ends it."""
        token = _current.set(self)
        try:
            yield self
        except BaseException as error:
            self.end(error)
            raise
        finally:
            _current.reset(token)


@contextmanager
def flow(name: str, subject: str, job: str) -> Iterator[Flow]:
    """A flow that begins and ends with the block, on one thread."""
    begun = Flow(name, subject, job)
    with begun.here():
        yield begun
    begun.end()


class FlowObserver(Protocol):
    """Is told of flows, on their threads. It must not raise exceptions."""

    def began(self, flow: Flow) -> None: ...

    def ended(self, flow: Flow, error: BaseException | None) -> None: ...


_flow_observers: list[tuple[FlowObserver, str | None]] = []
_current: ContextVar[Flow | None] = ContextVar("statemgr_flow", default=None)


def current_flow() -> Flow | None:
    """The flow to which the steps that this thread announces belong, if it is known here."""
    return _current.get()


def add_flow_observer(observer: FlowObserver, job: str | None = None) -> None:
    """Tell ``observer`` of the flows of a job that begin from now on (None: of all jobs)."""
    _flow_observers.append((observer, job))


def remove_flow_observer(observer: FlowObserver) -> None:
    """Tell it of no further flow. An observer that was not added is ignored."""
    _flow_observers[:] = [entry for entry in _flow_observers if entry[0] is not observer]
