"""Clean-up: after an acknowledged publish, and again at every opening. Idempotent; its failure does not fail a commit.

Steps:

1. remove the TTL of exactly the blobs that the published checkpoint added; a failure stays outstanding, and later
   commits and upkeep retry it, after longer and longer pauses. This also shows that each of them still exists
2. delete the blobs that carried changes to the publisher, and the attachments of evicted checkpoints
3. delete the blobs that only evicted checkpoints referenced, and their index last

If step 1 keeps failing, commits fail in the end (:meth:`CleanUp.retry_ttls`), because published blobs would expire. If
steps 2 and 3 fail, garbage remains, which expires or is deleted by ``statemgr gc``. A backend that no commit feeds any
more and that cannot be reached delays no commit: the next opening cleans up there.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence

from statemgr.config.factories import BLOB_STORE
from statemgr.config.units import DAY_MS
from statemgr.errors import ConfigError, CorruptError, MissingBlob, MissingError, RetryableError, StatemgrError
from statemgr.flows.published import Damage
from statemgr.logs import counted
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Marker, OutstandingTtl
from statemgr.model.commit import PreparedCommit
from statemgr.model.record_size import MOST_OUTSTANDING
from statemgr.phases import Phase, announce
from statemgr.services import Services

log = logging.getLogger(__name__)
#: Seconds of the longest pause before outstanding TTLs are tried again.
_LONGEST_PAUSE_S = 60.0


class CleanUp:
    """Cleans up after the publishes of one task.

    Attributes:
        damage: the damage of the current checkpoint's backups.
        lost_blobs: whether blobs of the newest commit were gone when it was published.
        skipped: backends that no commit feeds any more and that could not be reached since the opening → why.
    """

    def __init__(self, services: Services, task: str) -> None:
        self._services = services
        self._task = task
        #: blob → time (epoch milliseconds) since which its TTL could not be removed
        self._outstanding: dict[str, int] = {}
        #: outstanding TTLs are not tried before this time of the clock, and the pause (seconds) that led to it
        self._retry_s, self._pause_s = -math.inf, 0.0
        #: for what is outstanding, and for reading markers: commits and upkeep may try at the same time
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self.damage = Damage(task)
        #: the newest markers that are not checked yet, because a dead owner may have left their blobs with a TTL, and
        #: whether each is the current checkpoint's
        self._unread: list[tuple[str, str, Marker, bool]] = []
        self.lost_blobs = False
        self.skipped: dict[str, StatemgrError] = {}

    @property
    def outstanding(self) -> tuple[OutstandingTtl, ...]:
        """Published blobs that still have a TTL. The next checkpoint lists them."""
        outstanding = sorted(self._outstanding.items())
        if outstanding and self._services.config.blob_uri is not None:
            deleted = self._services.transfer().deleted
            outstanding = [found for found in outstanding if found[0] not in deleted]
        return tuple(OutstandingTtl(blob, since) for blob, since in outstanding)

    @property
    def count_outstanding(self) -> int:
        """The number of blobs that still have a TTL as far as is known, at least one while markers of a dead owner's
        last commit are unread. Any thread may ask."""
        return len(self._outstanding) + len(self._unread)

    @property
    def is_unfinished(self) -> bool:
        """Whether :meth:`retry_ttls` may have something to do. Any thread may ask."""
        return bool(self._outstanding or self._unread)

    def at_open(self, record: CheckpointRecord | None, *, delete: bool = True) -> None:
        """Finish the clean-up of an owner that died; ``delete``: also step 3. The next commits retry failures."""
        if record is None:
            return
        current = record.current
        self.damage.suspect()
        self._outstanding = {o.blob_id: o.since_ms for o in current.outstanding_ttl}
        newest: dict[tuple[str, str], Marker] = {}  # of a backend that the job has left, an older checkpoint has it
        for checkpoint in record.checkpoints:
            for factory, of_store in checkpoint.state_checkpoint_markers.items():
                for store, marker in of_store.items():
                    newest.setdefault((factory, store), marker)
        self._unread = [(*of, marker, current.marker(*of) == marker) for of, marker in newest.items()]
        now = self._now_ms()
        for attachment in current.attachments:
            if attachment.blob:
                self._outstanding.setdefault(attachment.blob.blob_id, now)
        try:
            self.try_again()
        except StatemgrError as error:
            log.warning(
                "%s: the TTL of published blobs could not be removed; the next commit tries again: %s",
                self._task,
                error,
            )
        if delete:
            self._delete_evicted((), record)
        announce(Phase.CLEANED_UP, self._task, self._services.config.job_key)

    def published(self, commit: PreparedCommit) -> None:
        """The TTLs of a commit's blobs are outstanding from now on, whatever becomes of :meth:`after_publish`."""
        now = self._now_ms()
        with self._lock:
            self._outstanding = dict.fromkeys(_referenced(commit), now) | self._outstanding

    def after_publish(self, before: CheckpointRecord | None, record: CheckpointRecord, commit: PreparedCommit) -> None:
        """Clean up after one acknowledged publish, and after :meth:`published`. Does not raise if a store fails; the
        failure is retried."""
        announce(Phase.REMOVE_TTL, self._task, self._services.config.job_key)
        self.lost_blobs = False
        referenced = _referenced(commit)
        try:
            self.lost_blobs = not self._remove_ttls(referenced).isdisjoint(referenced)
        except StatemgrError as error:
            log.warning("%s: the TTL could not be removed; the next commit tries again: %s", self._task, error)
        announce(Phase.DELETE_BLOBS, self._task, self._services.config.job_key)
        evicted, kept = _evicted(before, record), set(_attached(record.checkpoints))
        self._delete([*_transport(commit), *(blob for blob in _attached(evicted) if blob not in kept)])
        self._delete_evicted(evicted, record)
        announce(Phase.CLEANED_UP, self._task, self._services.config.job_key)

    def try_again(self) -> None:
        """Remove outstanding TTLs if it is time: at an opening, and between commits, because a task without input has
        none that does this.

        Any thread may call this. Raises: RetryableError if the additions of a dead owner's last commit cannot be read.
        """
        self._read_added()
        self._remove_ttls(())

    def retry_ttls(self) -> None:
        """Before a commit: try again to remove outstanding TTLs if the commit would be refused because of them.

        Raises: RetryableError if a TTL has been outstanding for a third of its time, if there are so many that the
        record would grow too large, or if the additions of a dead owner's last commit cannot be read yet.
        """
        self._read_added()
        if self._is_at_limit():
            self._retry_s = -math.inf
            self._remove_ttls(())
        if self._is_at_limit():
            blob, since = min(self._outstanding.items(), key=lambda item: item[1])
            age_ms = self._now_ms() - since
            raise RetryableError(
                f"the TTL of {len(self._outstanding)} published blobs could not be removed for {age_ms // 1000} s",
                hint="let this user remove TTLs (on S3: s3:DeleteObjectTagging); otherwise the blobs expire",
                job=self._services.config.job_name,
                task=self._task,
                blob=blob,
            )

    def _is_at_limit(self) -> bool:
        """Whether outstanding TTLs are so old or so many that no commit may follow."""
        if not self._outstanding:
            return False
        age_ms = self._now_ms() - min(self._outstanding.values())
        is_late = age_ms > self._services.config.ttl_days * DAY_MS // 3 and BLOB_STORE not in self.skipped
        return is_late or len(self._outstanding) >= MOST_OUTSTANDING

    def _skip_unreachable(self, factory: str, error: StatemgrError) -> None:
        """Skip a backend that no commit feeds and that cannot be reached. Raises: the error, for any other backend."""
        if factory in self._services.fed:
            raise error
        if factory not in self.skipped:
            self.skipped[factory] = error
            what = "%s: the job no longer uses %s, and its state there stays as it is until the next opening: %s"
            log.warning(what, self._task, factory, error)

    # --- step 1 --------------------------------------------------------------------------------------------------

    def _read_added(self) -> None:
        """Remove the TTLs of the blobs that the last commit of a dead owner added, marker by marker."""
        with self._reading:
            while self._unread:
                factory, store, marker, is_current = self._unread[-1]
                added: Sequence[str] = ()
                try:
                    if factory not in self.skipped:
                        manager = self._services.backup_manager(factory)
                        added = manager.added_blobs(self._services.identity(self._task, store), marker)
                except (MissingError, CorruptError) as error:
                    self._damaged(factory, store, error, is_current=is_current)
                except StatemgrError as error:
                    self._skip_unreachable(factory, error)
                if self._remove_ttls(added) & set(added):
                    self._damaged(factory, store, "it has lost blobs", is_current=is_current)
                self._unread.pop()

    def _damaged(self, factory: str, store: str, why: object, *, is_current: bool) -> None:
        config = self._services.config.stores.get(store)
        if is_current and config is not None and factory in config.backup_factories:
            self.damage.found(factory, store, why)
        else:
            what = "%s: older state in %s, which store %s does not need, is damaged: %s"
            log.warning(what, self._task, factory, store, why)

    def _remove_ttls(self, added: Iterable[str]) -> set[str]:
        """Remove the TTLs of ``added``, and outstanding ones if it is time. Returns: the blobs that do not exist."""
        now_s = self._services.clock.monotonic()
        is_due = now_s >= self._retry_s
        wanted = dict.fromkeys([*(self._outstanding if is_due else ()), *added])
        if wanted and self._services.config.blob_uri is None:
            what = "%s: the job no longer uses a blob store, and %d blobs of its checkpoints expire there"
            log.warning(what, self._task, len(wanted))
            self._outstanding, wanted = {}, {}
        if not wanted or (BLOB_STORE in self.skipped and not added):
            return set()
        problems = dict(self._services.transfer().remove_ttl_all(wanted))
        gone = [blob for blob, error in problems.items() if isinstance(error, MissingBlob)]
        for blob in gone:
            log.warning("%s: %s disappeared before its TTL was removed", self._task, blob)
            self.damage.suspect()
            del problems[blob]
        with self._lock:
            untried = {blob: since for blob, since in self._outstanding.items() if blob not in wanted}
            now = self._now_ms()
            self._outstanding = untried | {blob: self._outstanding.get(blob, now) for blob in problems}
            if is_due:
                self._pause_s = min(2 * self._pause_s + 1, _LONGEST_PAUSE_S) if problems else 0.0
                self._retry_s = now_s + self._pause_s
        for blob, error in [*problems.items()][:1]:
            what = "%s: the TTL of %s could not be removed, which is tried again; %s: %s"
            log.warning(what, self._task, counted(len(problems), "blob"), blob, error)
        for error in problems.values():
            if isinstance(error, RetryableError) and BLOB_STORE not in self._services.fed:
                self._skip_unreachable(BLOB_STORE, error)
        return set(gone)

    def _now_ms(self) -> int:
        return self._services.clock.time_ns() // 1_000_000

    # --- steps 2 and 3 -------------------------------------------------------------------------------------------

    def _delete(self, blobs: Sequence[str]) -> None:
        if not blobs:
            return
        try:
            for blob, error in self._services.transfer().delete_all(list(blobs)).items():
                log.warning("%s: could not delete %s: %s", self._task, blob, error)
        except StatemgrError as error:
            log.warning("%s: could not delete %s: %s", self._task, counted(len(blobs), "blob"), error)

    def _delete_evicted(self, evicted: Sequence[Checkpoint], record: CheckpointRecord) -> None:
        stores: dict[str, set[str]] = {}
        for checkpoint in (*evicted, *record.checkpoints):
            for factory, of_store in checkpoint.state_checkpoint_markers.items():
                stores.setdefault(factory, set()).update(of_store)
        for factory, names in sorted(stores.items()):
            if factory in self.skipped:
                continue
            gone = {store: _markers(evicted, factory, store) for store in sorted(names)}
            retained = {store: _markers(record.checkpoints, factory, store) for store in sorted(names)}
            try:
                manager = self._services.backup_manager(factory)
            except ConfigError as error:
                self._skip_unreachable(factory, error)
                continue
            self._try(factory, manager.clean_up_all, self._services.identity(self._task, ""), gone, retained)

    def _try(self, factory: str, clean_up: Callable[..., None], *args: object) -> None:
        try:
            clean_up(*args)
        except (MissingError, CorruptError) as error:
            log.warning("%s: a clean-up in %s deleted nothing: %s", self._task, factory, error)
            self.damage.suspect()
        except StatemgrError as error:
            if factory not in self._services.fed:
                self._skip_unreachable(factory, error)
            else:
                log.warning("%s: a clean-up in %s failed: %s", self._task, factory, error)


def _markers(checkpoints: Sequence[Checkpoint], factory: str, store: str) -> list[Marker]:
    found = [c.marker(factory, store) for c in checkpoints]
    return list(dict.fromkeys(m for m in found if m is not None))


def _evicted(before: CheckpointRecord | None, record: CheckpointRecord) -> list[Checkpoint]:
    kept = {c.checkpoint_id for c in record.checkpoints}
    return [c for c in (before.checkpoints if before else ()) if c.checkpoint_id not in kept]


def _attached(checkpoints: Iterable[Checkpoint]) -> list[str]:
    return [a.blob.blob_id for checkpoint in checkpoints for a in checkpoint.attachments if a.blob]


def _transport(commit: PreparedCommit) -> list[str]:
    """The blobs that carried changes to the publisher. Nothing refers to them after the publish."""
    return [
        changes.blob.blob_id
        for store in commit.stores.values()
        for changes in store.changes.values()
        if changes.blob is not None
    ]


def _referenced(commit: PreparedCommit) -> list[str]:
    """The blobs that the commit added and that its checkpoint refers to."""
    transport = set(_transport(commit))
    return [blob for blob in commit.added_blobs if blob not in transport]


def taken_over(services: Services, record: CheckpointRecord) -> CleanUp:
    """The clean-up of a task whose next checkpoint does not come from its owner. Removes the TTLs that a dead owner has
    left on blobs of the current checkpoint: the next opening will not, because it looks only at what is newest then.
    Raises: RetryableError.
    """
    clean_up = CleanUp(services, record.task)
    clean_up.at_open(record, delete=False)
    clean_up.retry_ttls()
    for factory in record.current.state_checkpoint_markers:
        error = clean_up.skipped.get(factory)
        if error is not None and not isinstance(error, ConfigError):
            raise error
    return clean_up
