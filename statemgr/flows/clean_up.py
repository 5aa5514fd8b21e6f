"""Clean-up: after a publish is acknowledged, and again at every open. Idempotent; failing, it fails no commit.

Steps:

1. REMOVE_TTL on exactly what the published checkpoint added; what fails stays outstanding and is retried
2. delete what carried the changes to the publisher
3. delete what only evicted checkpoints referenced: their blobs first, their index last
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from statemgr.errors import MissingBlob, RetryableError, StatemgrError
from statemgr.flows.parts import Parts
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Marker, OutstandingTtl
from statemgr.model.commit import PreparedCommit
from statemgr.phases import Phase, announce

log = logging.getLogger(__name__)
_DAY_MS = 24 * 3600 * 1000


class CleanUp:
    """Cleans up after the publishes of one task, and remembers which TTLs could not be removed yet."""

    def __init__(self, parts: Parts, task: str) -> None:
        self._parts = parts
        self._task = task
        self._outstanding: dict[str, int] = {}

    @property
    def outstanding(self) -> tuple[OutstandingTtl, ...]:
        """Blobs of published checkpoints that would still expire; they go into the next checkpoint."""
        return tuple(OutstandingTtl(blob, since) for blob, since in sorted(self._outstanding.items()))

    def at_open(self, record: CheckpointRecord | None) -> None:
        """Finish what an owner that died may have left half done."""
        if record is None:
            return
        self._outstanding = {o.blob_id: o.since_ms for o in record.current.outstanding_ttl}
        added = self._try("read what the last commit added", lambda: self._added(record.current)) or []
        self._remove_ttls(added)
        self._delete_evicted((), record)
        announce(Phase.CLEANED_UP, self._task)

    def after_publish(self, before: CheckpointRecord | None, record: CheckpointRecord, commit: PreparedCommit) -> None:
        """Clean up after one acknowledged publish. Never raises for a store that fails: it is retried."""
        announce(Phase.REMOVE_TTL, self._task)
        self._remove_ttls(commit.added_blobs)
        announce(Phase.DELETE_BLOBS, self._task)
        self._delete(_transport(commit))
        evicted = _evicted(before, record)
        self._delete(_superseded_attachments(before, record))
        self._delete_evicted(evicted, record)
        announce(Phase.CLEANED_UP, self._task)

    def check(self) -> None:
        """Retry what is outstanding. Raises: RetryableError when some has been so for a third of the TTL."""
        self._remove_ttls(())
        if not self._outstanding:
            return
        blob, since = min(self._outstanding.items(), key=lambda item: item[1])
        age_ms = self._now_ms() - since
        if age_ms > self._parts.config.ttl_days * _DAY_MS // 3:
            raise RetryableError(
                f"the TTL of {len(self._outstanding)} published blobs could not be removed for {age_ms // 1000} s",
                hint="allow deleting object tags (s3:DeleteObjectTagging); the blobs expire otherwise",
                job=self._parts.config.job_name,
                task=self._task,
                blob=blob,
            )

    def _now_ms(self) -> int:
        return self._parts.clock.time_ns() // 1_000_000

    def _remove_ttls(self, added: Iterable[str]) -> None:
        wanted = dict.fromkeys([*self._outstanding, *added])
        if not wanted:
            return
        failed = self._parts.transfer().remove_ttl_all(list(wanted))
        now = self._now_ms()
        kept = {}
        for blob, error in failed.items():
            if isinstance(error, MissingBlob):
                continue  # a later commit has deleted it
            kept[blob] = self._outstanding.get(blob, now)
            log.warning("task %s: REMOVE_TTL of %s failed, it is retried: %s", self._task, blob, error)
        self._outstanding = kept

    def _added(self, checkpoint: Checkpoint) -> list[str]:
        added = [a.blob.blob_id for a in checkpoint.attachments if a.blob]
        for factory, of_store in checkpoint.state_checkpoint_markers.items():
            for store, marker in of_store.items():
                identity = self._parts.identity(self._task, store)
                added += self._parts.backup_manager(factory).added_blobs(identity, marker)
        return added

    def _delete_evicted(self, evicted: Sequence[Checkpoint], record: CheckpointRecord) -> None:
        pairs = {
            (factory, store)
            for checkpoint in (*evicted, *record.checkpoints)
            for factory, of_store in checkpoint.state_checkpoint_markers.items()
            for store in of_store
        }
        for factory, store in sorted(pairs):
            gone = _markers(evicted, factory, store)
            retained = _markers(record.checkpoints, factory, store)
            identity = self._parts.identity(self._task, store)
            manager = self._parts.backup_manager(factory)
            self._try(
                f"clean up {factory} of {store}",
                lambda m=manager, i=identity, g=gone, r=retained: m.clean_up(i, g, r),
            )

    def _delete(self, blobs: Sequence[str]) -> None:
        if blobs:
            for blob, error in self._parts.transfer().delete_all(list(blobs)).items():
                log.warning("task %s: could not delete %s, it expires by itself: %s", self._task, blob, error)

    def _try(self, what: str, action):  # type: ignore[no-untyped-def]
        try:
            return action()
        except StatemgrError as error:
            log.warning("task %s: could not %s, it is retried at the next open: %s", self._task, what, error)
            return None


def _markers(checkpoints: Sequence[Checkpoint], factory: str, store: str) -> list[Marker]:
    found = [c.marker(factory, store) for c in checkpoints]
    return list(dict.fromkeys(m for m in found if m is not None))


def _evicted(before: CheckpointRecord | None, record: CheckpointRecord) -> list[Checkpoint]:
    kept = {c.checkpoint_id for c in record.checkpoints}
    return [c for c in (before.checkpoints if before else ()) if c.checkpoint_id not in kept]


def _superseded_attachments(before: CheckpointRecord | None, record: CheckpointRecord) -> list[str]:
    current = {a.blob.blob_id for a in record.current.attachments if a.blob}
    old = before.current.attachments if before else ()
    return [a.blob.blob_id for a in old if a.blob and a.blob.blob_id not in current]


def _transport(commit: PreparedCommit) -> list[str]:
    """The blobs that carried changes to the publisher: nothing refers to them after the publish."""
    return [
        changes.blob.blob_id
        for store in commit.stores.values()
        for changes in store.changes.values()
        if changes.blob is not None
    ]
