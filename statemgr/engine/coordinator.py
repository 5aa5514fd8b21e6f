"""The owner of a task, or of a whole job: publishes prepared commits and keeps track of what is published. And the
thread of a process that looks after its owners.

Both kinds of owner do two things in the same way:

- if the acknowledgement of a publish is lost, the owner finds out before the next publish whether it succeeded, and if
  so does what follows a publish
- the backups of the current checkpoints are checked when their damage is suspected

The thread looks from time to time at what the owners rely on: the settings of the job's topics, the changelogs, and the
blobs (:mod:`statemgr.flows.upkeep`). Commits send no request for this. It also removes the TTLs that a commit could not
remove, because a task without input has no later commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from statemgr.errors import ClosedError, FencedError, StatemgrError
from statemgr.flows.committing.clean_up import CleanUp
from statemgr.flows.committing.commit import CommitBase, Refill
from statemgr.flows.committing.publish import publish
from statemgr.flows.offers import Adoption
from statemgr.flows.opening.open_job import JobTopics
from statemgr.flows.owner import Owner
from statemgr.flows.published import Damage, Published
from statemgr.flows.sweep import Sweep
from statemgr.flows.upkeep import Turn, Upkeep, find_damage, look
from statemgr.flows.worker import Worker
from statemgr.model.checkpoint import MicroBatch
from statemgr.model.checkpoint_records import Inputs
from statemgr.model.commit import PreparedCommit
from statemgr.ports import BackupLost
from statemgr.services import Services
from statemgr.telemetry.metrics import Metrics

log = logging.getLogger(__name__)
#: Seconds between two looks.
LOOK_S = 60.0


class Coordinator:
    """One publisher and its tasks. Only one thread at a time may publish.

    Attributes:
        clean_ups: task → the clean-up after its publishes, which knows the damage of its backups.
    """

    def __init__(self, owner: Owner, topics: JobTopics) -> None:
        self.owner = owner
        self._topics = topics
        self._services, self._log = owner.services, owner.log
        self.clean_ups = {task: CleanUp(self._services, task) for task in owner.published.records}
        self._watching: Metrics | None = None
        self._series = {
            "checkpoint_timestamp_seconds": self.checkpoint_times, "blobs_with_ttl": self.blobs_with_ttl,
        }  # fmt: skip
        #: The commits of a publish whose outcome is unknown, and what to call if it succeeded.
        self._unsettled: tuple[Sequence[PreparedCommit], Callable[[], object]] | None = None

    @property
    def published(self) -> Published:
        """What is published for each task."""
        return self.owner.published

    @property
    def settled(self) -> bool:
        """Whether the outcome of every publish is known."""
        return self._unsettled is None

    def checkpoint_times(self) -> list[tuple[tuple[str, ...], float]]:
        """Task → when its newest published checkpoint was taken (seconds since the epoch), as series of a metric."""
        found = dict(self.published.records)
        return [((task,), record.current.checkpoint_id.millis / 1000) for task, record in found.items() if record]

    def blobs_with_ttl(self) -> list[tuple[tuple[str, ...], float]]:
        """Task → number of its published blobs that still have a TTL, as series of a metric."""
        return [((task,), clean_up.count_outstanding) for task, clean_up in self.clean_ups.items()]

    def watched_by(self, metrics: Metrics) -> None:
        """Let ``metrics`` ask for these numbers until :meth:`close`."""
        for name, source in self._series.items():
            metrics.watch(name, source)
        self._watching = metrics

    def base(self, task: str, refill: Refill = frozenset()) -> CommitBase:
        """What the task's next commit continues; it fills ``refill`` and the damaged backups."""
        published = self.published
        refill |= self.clean_ups[task].damage.pairs
        return CommitBase(task, published.layout, published.epoch, published.checkpoint(task), refill)

    def confirm(self) -> None:
        """Check that nobody else has published. Raises: FencedError, UnavailableError, AccessDenied."""
        with self.owner.owned():
            self.owner.confirm()

    def settle(self) -> Sequence[PreparedCommit]:
        """Find out whether a publish whose acknowledgement was lost has succeeded, and if so do what follows it.

        Returns: the commits that turned out to be published; none if there is nothing to settle.
        Raises: FencedError, also if an earlier call raised it; OutcomeUnknownError, MissingState.
        """
        with self.owner.owned():
            if self._unsettled is None:
                return ()
            was_published = self.owner.settle()
        (commits, follow_up), self._unsettled = self._unsettled, None
        if not was_published:
            return ()
        follow_up()
        return commits

    def look_for_damage(self, task: str) -> bool:
        """Check the backups of the task's current checkpoint if damage is suspected. Any thread may call this.

        Returns: False if the check has to be repeated, because a newer checkpoint was published meanwhile.
        Raises: RetryableError, AccessDenied: a blob could not be checked.
        """
        checkpoint, damage = self.published.checkpoint(task), self.clean_ups[task].damage
        suspicion = damage.suspicion
        if checkpoint is None or suspicion is None:
            return True
        found = find_damage(self._services, task, checkpoint)
        if self.published.checkpoint(task) is not checkpoint:
            return False  # the older checkpoint may be evicted by now, and its blobs deleted
        damage.checked(suspicion, found)
        return True

    def look(self, task: str, turn: Turn) -> None:
        """Check a part of the backups of the task's current checkpoint, and let a repair that was given up begin again
        if the task has its turn. Any thread may call this.

        Raises: RetryableError, AccessDenied: something could not be checked.
        """
        if self.owner.is_fenced:
            return
        if turn.of(task) is not None:  # not in each look: a repair may restore and upload the whole store
            self.damage_of(task).remind()
        found, damage = look(self._services, task, lambda: self.published.checkpoint(task), turn), self.damage_of(task)
        if found is None:
            damage.suspect()
        for (factory, store), why in (found or {}).items():
            damage.found(factory, store, why)

    def damage_of(self, task: str) -> Damage:
        """The known damage of the backups of a task's current checkpoint."""
        return self.clean_ups[task].damage

    @contextmanager
    def _adopting(self, adoptions: Sequence[Adoption]) -> Iterator[None]:
        """A block that publishes adoptions, and deletes their offers."""
        permits, self.published.permits = self.published.permits, ()  # the first commit uses them up
        self.published.offers = tuple(key for adoption in adoptions for key in adoption.offers)
        try:
            yield
        finally:
            self.published.permits = permits

    def close(self) -> None:
        """Release the transactional ID."""
        if self._watching is not None:
            for source in self._series.values():
                self._watching.unwatch(source)
        self.owner.close()

    def _publish(
        self,
        commits: Sequence[PreparedCommit],
        follow_up: Callable[[], object],
        batch: MicroBatch | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        """Publish in one transaction. The caller then calls ``follow_up``; if the outcome is unknown, :meth:`settle`
        does."""
        if self._topics.unsafe is not None:
            raise self._topics.unsafe.error()
        outstanding = {task: clean_up.outstanding for task, clean_up in self.clean_ups.items()}
        try:
            publish(self.owner, commits, batch=batch, inputs=inputs, outstanding=outstanding)
        except BaseException as error:
            if self.published.pending:
                self._unsettled = commits, follow_up
            elif isinstance(error, BackupLost):
                where = {name: str(value) for name, value in error.where.items()}
                self.damage_of(where["task"]).found(where["backend"], where["store"], error.message)
                self._topics.create_changelogs()
            elif isinstance(error, FencedError) and all(c.epoch == self.published.epoch for c in commits):
                self.owner.fenced_by(error)  # commits of another epoch are stale, which does not fence the owner
            raise


class UpkeepThread:
    """Looks after the owners of a process. ``owners``: those that are there now."""

    def __init__(self, services: Services, topics: JobTopics, owners: Callable[[], Iterable[Coordinator]]) -> None:
        self._topics = topics
        self._owners = owners
        self._clock = services.clock
        self._upkeep = Upkeep(services)
        self._sweep = Sweep(services)
        #: task → when its unfinished clean-up was tried
        self._tried_s: dict[str, float] = {}
        self._worker: Worker[None] = Worker(services, "upkeep", f"job {services.config.job_name}", background=True)

    def start(self) -> None:
        """Look from now on. Idempotent."""
        self._worker.attempt("looking after the backups", self._run)

    def look(self) -> None:
        """Look once. A part that fails is logged, and looked at the next time."""
        self._try("the topics", self._topics.look)
        owners = list(self._owners())
        if not any(owner.owner.of_job for owner in owners):  # the executors have the tasks of such a job
            self._sweep.start(task for owner in owners for task in owner.clean_ups)
        self._finish_clean_ups(owners)
        turns: list[Turn] = []
        self._try("the orders to check blobs", lambda: turns.append(self._upkeep.turn()))
        for turn in turns:
            looks = [(task, owner.look) for owner in owners for task in owner.clean_ups]
            for task, look_at in looks:
                of_task = self._upkeep.of_task(task, turn)
                if not self._try(task, partial(look_at, task, of_task)):
                    self._upkeep.repeat(task, of_task)

    def _finish_clean_ups(self, owners: Iterable[Coordinator]) -> None:
        """Those that were tried longest ago first, until one is not finished: it may have waited for the blob store for
        as long as requests are repeated."""
        unfinished = [
            (self._tried_s.get(task, 0.0), task, clean_up)
            for owner in owners
            for task, clean_up in owner.clean_ups.items()
            if clean_up.is_unfinished and not owner.owner.is_fenced
        ]
        self._tried_s = {task: tried_s for tried_s, task, _ in unfinished}
        for _, task, clean_up in sorted(unfinished, key=lambda one: one[:2]):
            self._tried_s[task] = self._clock.elapsed()
            if not self._try(task, clean_up.try_again) or clean_up.is_unfinished:
                break

    def close(self) -> None:
        """Stop. Nobody waits for a look in progress."""
        self._sweep.worker.close(wait=False)
        self._worker.close(wait=False)

    def _run(self) -> None:
        looked_s = self._clock.elapsed()
        while self._worker.pause(LOOK_S):
            # after a stop has given up what is in progress, pauses are short
            if self._clock.elapsed() - looked_s >= LOOK_S:
                self.look()
                looked_s = self._clock.elapsed()

    def _try(self, what: str, part: Callable[[], None]) -> bool:
        """Returns: whether it was looked at."""
        self._worker.go_on()
        try:
            part()
            return True
        except ClosedError:
            raise
        except StatemgrError as error:
            log.warning("%s could not be looked at, which is tried again: %s", what, error)
        except Exception:  # the next look must come
            log.exception("%s could not be looked at, which is tried again", what)
        return False
