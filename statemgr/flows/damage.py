"""Damage: backups of a task's current checkpoint that are incomplete or corrupt.

An opening, a clean-up, a background snapshot or a collection that meets a lost or altered blob notes it here. What it
is sure of is *found*: a store's backup in one backend. What only looks wrong, or could not be asked, is *suspected*,
and :func:`find_damage` looks at everything that the current checkpoint refers to. :mod:`statemgr.flows.repair` makes
again what was found, or the next commit does if that comes first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping

from statemgr.errors import CorruptError, MissingBlob, MissingError
from statemgr.flows.commit import Refill
from statemgr.flows.parts import Parts
from statemgr.flows.restore import StoreRestore
from statemgr.model.checkpoint import Checkpoint

log = logging.getLogger(__name__)


class Damage:
    """What is known of the backups of one task's current checkpoint. Safe to use from many threads."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._pairs: dict[tuple[str, str], None] = {}
        self._suspicions = self._answered = 0
        self._changed: Callable[[], None] = lambda: None

    def watch(self, changed: Callable[[], None]) -> None:
        """Call this whenever there is something to look at or to repair, from whichever thread; and now, if so."""
        self._changed = changed
        if self.pairs or self.suspicion is not None:
            changed()

    @property
    def pairs(self) -> Refill:
        """(factory, store) pairs whose backup has to be made again."""
        with self._lock:
            return frozenset(self._pairs)

    @property
    def suspicion(self) -> int | None:
        """What :meth:`checked` answers; None when nothing is suspected."""
        with self._lock:
            return self._suspicions if self._suspicions > self._answered else None

    def suspect(self) -> None:
        """Something may be wrong: everything is looked at."""
        with self._lock:
            self._suspicions += 1
        self._changed()

    def found(self, factory: str, store: str, why: object) -> None:
        """A backup of the current checkpoint is incomplete or corrupt."""
        with self._lock:
            if (factory, store) in self._pairs:
                return
            self._pairs[factory, store] = None
        log.error("task %s: the backup of %s in %s is damaged and is made again: %s", self._task, store, factory, why)
        self._changed()

    def checked(self, suspicion: int, found: Mapping[tuple[str, str], str]) -> None:
        """Everything was looked at since a suspicion."""
        with self._lock:
            self._answered = max(self._answered, suspicion)
        for (factory, store), why in found.items():
            self.found(factory, store, why)

    def note(self, restored: Iterable[StoreRestore]) -> None:
        """What a restore has found on its way."""
        for one in restored:
            for factory in one.damaged:
                self.found(factory, one.store, one.reasons.get(factory, "it could not be restored"))
            if one.unreachable:
                self.suspect()

    def repaired(self, pairs: Collection[tuple[str, str]]) -> None:
        """A checkpoint was published that has new backups of these."""
        with self._lock:
            for pair in pairs:
                self._pairs.pop(pair, None)


def find_damage(parts: Parts, task: str, checkpoint: Checkpoint) -> Mapping[tuple[str, str], str]:
    """Look for every blob that a restore from the checkpoint needs, in each backend that the job backs up to.

    Its requests: a GET for each index that this process has not read yet, a HEAD for each blob.

    Returns: (factory, store) → what is missing or corrupt.
    Raises: RetryableError, AccessDenied: it could not be found out.
    """
    found: dict[tuple[str, str], str] = {}
    needed: dict[str, list[tuple[str, str]]] = {}
    for name, store in parts.config.stores.items():
        for factory in store.backup_factories:
            marker, manager = checkpoint.marker(factory, name), parts.backup_manager(factory)
            if marker is None or not hasattr(manager, "referenced_blobs"):
                continue
            try:
                for blob_id in manager.referenced_blobs(parts.identity(task, name), marker):
                    needed.setdefault(blob_id, []).append((factory, name))
            except (MissingError, CorruptError) as error:
                found[factory, name] = str(error)
    for blob_id, problem in (parts.transfer().absent(needed) if needed else {}).items():
        if not isinstance(problem, MissingBlob):
            raise problem
        found |= dict.fromkeys(needed[blob_id], f"{blob_id} is missing")
    return found
