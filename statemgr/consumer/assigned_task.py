"""A task that a member of a consumer group owns: its source partitions, its restore, its commits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from statemgr.engine.task import Task
from statemgr.errors import LocalStateLost, OutcomeUnknownError, RetryableError, UnavailableError
from statemgr.kafka.input_position import InputPosition
from statemgr.logs import Event, tell
from statemgr.model.checkpoint import Checkpoint
from statemgr.ports import Clock, TransactionOpen

log = logging.getLogger(__name__)
#: Seconds between two lines in the log about the failed commits of a task.
_LOG_S = 10.0
#: Seconds until a commit that failed is repeated, if ``task.commit.ms`` is longer.
_AGAIN_S = 5.0


@dataclass(eq=False)
class AssignedTask:
    """Task ``index`` of this member. Only the loop's thread uses it.

    Attributes:
        sources: the source partitions that are its current input.
        retained: how many checkpoints the topic retains of it.
        opening: the opening of the task, which restores it. It begins when the partitions of all topics are here.
        inputs: its source partitions. They are paused until the task is restored and they are at its input offsets.
        task: the open task; None while it is being opened.
        dirty: whether a message was processed, or a timer changed something, since the last commit began.
        held: whether its partitions are paused until the commit in progress ends.
        waits: whether its opening is tried again while something cannot be reached.
        retry_s: when that is due, on the clock of durations; None if nobody has looked at the failure yet.
        told: the failure that the log has.
        reopened: whether it was opened again since its last commit, because its local files were damaged or missing.
        announced: whether the application was told that the task is open.
        lost: set when the task was taken away, which ends an opening in progress.
        processed: number of messages that the application has processed, also again after the task was opened again.
        assigned_s: when its first partition arrived, on the monotonic clock.
        starts_latest: whether it begins at the end of its input if it has no checkpoint.
        at_end: whether it had none when it was opened, and so begins there.
    """

    index: int
    sources: frozenset[str]
    retained: int
    opening: Future[Task]
    clock: Clock
    max_delay_s: float
    commit_timeout_s: float
    inputs: list[InputPosition] = field(default_factory=list)
    task: Task | None = None
    dirty: bool = False
    held: bool = False
    waits: bool = False
    retry_s: float | None = None
    told: str = ""
    reopened: bool = False
    announced: bool = False
    lost: threading.Event = field(default_factory=threading.Event)
    assigned_s: float = 0.0
    processed: int = 0
    starts_latest: bool = False
    at_end: bool = False
    _commit: Future[Checkpoint] | None = None
    _commit_started: float = 0.0
    #: Seconds for which this process was suspended since then.
    _suspended_s: float = 0.0
    #: Since when a repair of the backups has kept a commit that is due from starting.
    _kept_since: float | None = None
    _failing_since: float | None = None
    #: When a commit that failed is due again.
    _again_s: float = float("inf")
    #: Commits since the opening.
    _made: int = 0
    #: Failed commits that no line in the log has counted, and when the next line may come.
    _unlogged: int = 0
    _next_line: float = float("-inf")

    def restored(self) -> bool:
        """Whether the task is open. Raises: the error of the restore."""
        if self.task is None and self.opening.done() and self.unreachable() is None:
            self.task = self.opening.result()
            self.at_end = self.starts_latest and self.task.last_checkpoint is None
        return self.task is not None

    def unreachable(self) -> UnavailableError | None:
        """Why the opening is to be tried again; None if it is in progress, has succeeded, or has failed for good."""
        if not self.waits or self.task is not None or not self.opening.done():
            return None
        error = self.opening.exception()
        return error if isinstance(error, UnavailableError) else None

    @property
    def begun(self) -> bool:
        """Whether it can process and commit. A first checkpoint without the offset of a source partition would lead the
        next owner to the first offset, and not to the end."""
        return not self.at_end or all(position.next is not None for position in self.inputs)

    @property
    def offsets(self) -> dict[str, int]:
        """Source partition → next offset to process: the checkpoint's, and what this member has reached.

        Partitions that are no input any more are left out once the newest checkpoints were made without them.
        """
        assert self.task is not None
        reached = {position.source: position.next for position in self.inputs if position.next is not None}
        start = self.task.start_offsets
        if self._made >= self.retained:
            start = {source: offset for source, offset in start.items() if source in self.sources}
        return {**start, **reached}

    @property
    def committing(self) -> bool:
        """Whether a commit that :meth:`start_commit` has begun was not taken by :meth:`ended_commit` yet."""
        return self._commit is not None

    @property
    def commits_early(self) -> bool:
        """Whether a commit should begin before ``task.commit.ms`` has passed, because much output waits for it, or to
        repeat one that failed."""
        if self.task is None or self.committing:
            return False
        return self.task.has_much_output or self.clock.monotonic() >= self._again_s

    @property
    def uncommitted(self) -> bool:
        """Whether there is something to commit, or a commit in progress."""
        return self.task is not None and self.begun and (self.dirty or self.committing)

    def start_commit(self) -> None:
        """Start a periodic commit if there is something to commit and no commit is in progress. If a repair of the
        backups is, the commit is due again at once, and the other tasks of the loop go on meanwhile.

        Raises: the error of the last commit, if repeating it cannot help or if commits have failed for
        ``task.commit.timeout.ms``. TransactionOpen is never raised: it ends when that transaction does.
        """
        if self.task is None:
            return
        self._again_s = float("inf")
        if self._commit is not None:
            self.task.metrics.skipped()  # the next one covers it
        elif self.dirty and self.begun and not self.task.may_commit():
            self._again_s = self.clock.monotonic()
            self._kept_since = self._again_s if self._kept_since is None else self._kept_since
        elif self.dirty and self.begun:
            self._commit_started, self._suspended_s, self._kept_since = self.clock.monotonic(), 0.0, None
            try:
                self._prove(self.task)
                self._commit = self.task.commit_async(self.offsets)
                self.dirty = False
            except (RetryableError, OutcomeUnknownError) as error:
                self._failed(self.task, error)

    def ended_commit(self) -> Checkpoint | None:
        """The checkpoint of a commit that has ended since the last call. Raises: as :meth:`start_commit`."""
        if self.task is None or self._commit is None or not self._commit.done():
            return None
        commit, self._commit = self._commit, None
        error = commit.exception()
        if error is None:
            self._failing_since, self.reopened = None, False
            self._committed(self.task)
            return commit.result()
        self.dirty = True
        self.task.forgive()
        self._failed(self.task, error)
        return None

    def open_again(self, inputs: list[InputPosition], *, waits: bool) -> None:
        """Forget the task, for a new opening of it, which continues from the checkpoint and processes uncommitted input
        again. ``waits``: because a part of its state could not be reached, and not because local files were damaged."""
        self.opening, self.inputs, self.task, self._commit = Future(), inputs, None, None
        self.waits, self.retry_s, self.told = waits, None, ""
        self.dirty = self.held = self.announced = False
        self._made = 0
        self.reopened, self._failing_since, self._again_s = self.reopened or not waits, None, float("inf")
        self._kept_since = None

    def hold_back(self) -> bool:
        """Whether to process nothing for now, because the commit in progress is older than
        ``task.commit.max.delay.ms``, or one that is due waits as long for a repair, or much output waits for a commit.

        Raises: UnavailableError if the commit is older than ``task.commit.timeout.ms``.
        """
        if self.task is None or not self.begun:
            return False
        age = max(0.0, (self.task.pending_commit_seconds or 0.0) - self._suspended_s)
        if age > self.commit_timeout_s:
            raise UnavailableError(
                f"a commit did not end within task.commit.timeout.ms = {self.commit_timeout_s * 1000:.0f}",
                task=self.task.name,
            )
        if self._kept_since is not None:
            age = max(age, self.clock.monotonic() - self._kept_since)
        self.task.metrics.log.waits(age)
        held = age > self.max_delay_s or self.task.has_much_output
        self.task.metrics.hold(held)
        return held

    def suspended(self, seconds: float) -> None:
        """This process was suspended: no time has passed for commits, and the one in progress fails by itself if its
        transaction has timed out."""
        self._commit_started += seconds
        self._suspended_s += seconds
        if self._failing_since is not None:
            self._failing_since += seconds

    def commit_and_wait(self, again: Callable[[], bool]) -> Checkpoint | None:
        """Commit what is not committed. A commit that may succeed later is tried once more if ``again`` says so.

        Returns: the checkpoint; None if there was nothing to commit.
        """
        if self.task is None or not self.uncommitted:
            return None
        try:
            checkpoint = self._commit_proved(self.task)
        except (RetryableError, OutcomeUnknownError) as error:
            if isinstance(error, LocalStateLost | TransactionOpen) or not again():
                raise
            self._log_repeat(self.task, error)
            checkpoint = self._commit_proved(self.task)
        self.dirty, self._commit = False, None
        self._committed(self.task)
        return checkpoint

    def _commit_proved(self, task: Task) -> Checkpoint:
        self._prove(task)
        return task.commit(self.offsets)

    def _committed(self, task: Task) -> None:
        """Count a commit. Says once which offsets the next one drops."""
        self._made += 1
        gone = sorted(task.start_offsets.keys() - self.sources) if self._made == self.retained else ()
        if gone:
            log.info(
                "%s: the next commit drops the offsets of %s, because they are no input any more, and the newest "
                "checkpoints were made without them", task.name, ", ".join(gone),
            )  # fmt: skip

    def _prove(self, task: Task) -> None:
        """Prove that no message was skipped. Raises: MissingState, UnavailableError."""
        with task.metrics.begins_commit():
            for position in self.inputs:
                position.prove()

    def _failed(self, task: Task, error: BaseException) -> None:
        waits = isinstance(error, TransactionOpen)
        since = self._failing_since or self._commit_started
        # the end of the loop would not help: the next owner would commit what may be open there
        self._failing_since = None if waits else since
        too_long = not waits and self.clock.monotonic() - since > self.commit_timeout_s
        may_pass = isinstance(error, RetryableError | OutcomeUnknownError) and not isinstance(error, LocalStateLost)
        if too_long or not may_pass:
            raise error
        self._again_s = self.clock.monotonic() + _AGAIN_S
        self._log_repeat(task, error)

    def _log_repeat(self, task: Task, error: BaseException) -> None:
        """Write at most one line in :data:`_LOG_S` seconds: a commit may be due again every few milliseconds."""
        self._unlogged += 1
        now = self.clock.monotonic()
        if now < self._next_line:
            return
        failed, self._unlogged, self._next_line = self._unlogged, 0, now + _LOG_S
        tell(
            log, Event.RETRYING, "%s: a commit failed and is repeated%s: %s",
            task.name, f" ({failed} times since the last line)" if failed > 1 else "", error,
            level=logging.WARNING, task=task.name, error=type(error).__name__, retries=failed,
        )  # fmt: skip
