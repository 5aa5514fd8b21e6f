"""Names of the steps of commit and restore, and how to observe them.

Flows announce each step before they take it. Metrics, progress bars, the demo and the crash tests observe them.
An observer runs on the thread of the flow, and an exception in it is raised there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum


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
    # in the background, next to commits
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


def tasks_of(subject: str) -> list[str]:
    """The tasks in the subject of a step; none for a step of the whole job."""
    names = [name.partition("/")[0] for name in subject.split(", ")]
    return [name for name in names if name.startswith("Partition ")]


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
