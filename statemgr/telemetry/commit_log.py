"""What the log says about the commits of one task: at most one line in :data:`INTERVAL_S` seconds, with the sums since
the line before, and a line about a commit that takes long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from statemgr.logs import Event, counted, size, tell
from statemgr.model.checkpoint import Checkpoint
from statemgr.phases import Phase
from statemgr.ports import Clock

log = logging.getLogger(__name__)
#: Seconds between two lines about the commits of a task.
INTERVAL_S = 30.0
#: Seconds after which a commit in progress has a line.
LONG_S = 10.0
_BLOBS, _KAFKA, _DISK, _CLEAN_UP = "the blob store", "Kafka", "the local disk", "the blob store, to clean up"
_EITHER = "Kafka or the blob store, to begin the backups"
#: What a task waits for while it is in a phase.
_WAITS_FOR = {
    Phase.FENCE: "Kafka, to fence older owners",
    Phase.READ_TOPIC: "Kafka, to read the checkpoint topic",
    Phase.GET_INDEX: _BLOBS,
    Phase.FETCH: _BLOBS,
    Phase.REPLAY: "Kafka, to replay the changelog",
    Phase.APPLY_SEGMENTS: _DISK,
    Phase.VERIFY: _DISK,
    Phase.SWAP: _DISK,
    Phase.OPEN: _DISK,
    # the flush has ended before a commit is in progress
    Phase.FLUSH: _EITHER,
    Phase.CHECKPOINT_DIR: _EITHER,
    Phase.DIFF: _BLOBS,
    Phase.UPLOAD: _BLOBS,
    Phase.PUT_INDEX: _BLOBS,
    Phase.PUT_SEGMENTS: _BLOBS,
    Phase.PREPARED: _KAFKA,
    Phase.BEGIN: _KAFKA,
    Phase.SEND_CHANGELOG: _KAFKA,
    Phase.SEND_CHECKPOINT: _KAFKA,
    Phase.COMMIT_TRANSACTION: _KAFKA,
    Phase.ACKNOWLEDGED: _CLEAN_UP,
    Phase.REMOVE_TTL: _CLEAN_UP,
    Phase.DELETE_BLOBS: _CLEAN_UP,
    Phase.DELETE_INDEX: _CLEAN_UP,
}


def waits_for(phase: Phase | None) -> str:
    """What a task waits for that has announced this phase last, and the phase itself."""
    if phase is None:
        return "a free thread"
    return f"{_WAITS_FOR.get(phase, 'other work')} (phase {phase.value})"


class CommitLog:
    """Sums up commits. The first one has a line of its own. Safe to use from many threads.

    Args:
        phase: returns the phase that the task has announced last.
    """

    def __init__(self, job: str, task: str, clock: Clock, phase: Callable[[], Phase | None]) -> None:
        self._job = job
        self._task = task
        self._clock = clock
        self._phase = phase
        self._lock = threading.Lock()
        self._last: float | None = None
        self._checkpoint: Checkpoint | None = None
        self._next_wait = LONG_S
        #: Those of the commit in progress. A commit that fails is repeated with the same changes.
        self.changes = self.uploaded = 0
        self._forget()

    def took(self, phase: str, seconds: float) -> None:
        """A phase of a commit has ended."""
        with self._lock:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def committed(self, checkpoint: Checkpoint) -> None:
        """Count a published commit, and write the line if it is time."""
        with self._lock:
            self._commits += 1
            self._changes += self.changes
            self._bytes += self.uploaded
            self._checkpoint = checkpoint
            self.changes = self.uploaded = 0
            now = self._clock.elapsed()
            if self._last is None or now - self._last >= INTERVAL_S:
                self._write(now, checkpoint)

    def waits(self, age_s: float) -> None:
        """Say what a commit waits for that is so old: after :data:`LONG_S`, and then every :data:`INTERVAL_S`."""
        if age_s < LONG_S:
            self._next_wait = LONG_S
        elif age_s >= self._next_wait:
            self._next_wait = age_s + INTERVAL_S
            tell(
                log, Event.WAITING, "%s: a commit has been in progress for %.0f s, and waits for %s",
                self._task, age_s, waits_for(self._phase()),
                level=logging.WARNING, job=self._job, task=self._task, seconds=round(age_s, 1), phase=self._phase(),
            )  # fmt: skip

    def close(self) -> None:
        """Write the line about commits that no line has counted."""
        with self._lock:
            if self._commits and self._checkpoint is not None:
                self._write(self._clock.elapsed(), self._checkpoint)

    def _write(self, now: float, checkpoint: Checkpoint) -> None:
        phases = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        count = counted(self._commits, "commit")
        tell(
            log, Event.COMMITTED, "%s: committed %s (%s: %s, %s uploaded; %s)",
            self._task, checkpoint.checkpoint_id,
            count if self._last is None else f"{count} in {now - self._last:.0f} s",
            counted(self._changes, "change"), size(self._bytes),
            ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items()),
            job=self._job, task=self._task, checkpoint=str(checkpoint.checkpoint_id),
            sequence=checkpoint.sequence, commits=self._commits, changes=self._changes, bytes=self._bytes,
            phases=phases,
        )  # fmt: skip
        self._last = now
        self._forget()

    def _forget(self) -> None:
        self._commits = self._changes = self._bytes = 0
        self._seconds: dict[str, float] = {}
        self._checkpoint = None
