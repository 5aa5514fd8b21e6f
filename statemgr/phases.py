"""Names of the steps of commit and restore, and how to watch them. Pure, but for calling the observers.

Flows announce each step before they take it. Metrics, progress bars, the demo and the crash tests listen.
An observer runs on the thread of the flow, and what it raises is raised there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum


class Phase(StrEnum):
    """A step that is about to be taken."""

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
    # in the background, beside commits
    MATERIALIZE = "materialize.begin"
    MATERIALIZED = "materialize.done"
    OUTPUT = "output.write"


Observer = Callable[[Phase, str], None]
_observers: list[Observer] = []


def announce(phase: Phase, subject: str = "") -> None:
    """Tell every observer that ``phase`` is about to happen to ``subject`` (a task, or ``task/store``)."""
    for observer in tuple(_observers):
        observer(phase, subject)


def add_observer(observer: Observer) -> None:
    """Call ``observer(phase, subject)`` at each step in this process, until it is removed."""
    _observers.append(observer)


def remove_observer(observer: Observer) -> None:
    """Stop calling ``observer``."""
    _observers.remove(observer)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Observe inside a ``with`` block."""
    add_observer(observer)
    try:
        yield
    finally:
        remove_observer(observer)
