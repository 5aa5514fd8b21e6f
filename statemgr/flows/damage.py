"""Damage: backups of a task's current checkpoint that are incomplete or corrupt.

Steps:

1. an opening, a clean-up or a background snapshot meets a lost or altered blob, and notes it here: as *found* if it is
   sure that a store's backup in one backend is damaged, as *suspected* if something only looks wrong or could not be
   read
2. after a suspicion, :func:`find_damage` looks at every blob that the current checkpoint refers to
3. :mod:`statemgr.flows.repair`, or the next commit if that comes first, makes the damaged backups again
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping

from statemgr.backends.services import Services
from statemgr.errors import CorruptError, MissingBlob, MissingError
from statemgr.flows.commit import Refill
from statemgr.flows.restore import StoreRestore
from statemgr.model.checkpoint import Checkpoint

log = logging.getLogger(__name__)


class Damage:
    """The known damage of one task's current checkpoint. Safe to use from many threads."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._pairs: dict[tuple[str, str], None] = {}
        self._suspicions = self._answered = 0
        self._changed: Callable[[], None] = lambda: None

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever there is something to check or to repair, from any thread; at once if there already
        is."""
        self._changed = changed
        if self.pairs or self.suspicion is not None:
            changed()

    @property
    def pairs(self) -> Refill:
        """(factory, store) pairs whose backup must be made again."""
        with self._lock:
            return frozenset(self._pairs)

    @property
    def suspicion(self) -> int | None:
        """The number of the suspicion to pass to :meth:`checked`; None if nothing is suspected."""
        with self._lock:
            return self._suspicions if self._suspicions > self._answered else None

    def suspect(self) -> None:
        """Note that something may be wrong, so that everything is checked."""
        with self._lock:
            self._suspicions += 1
        self._changed()

    def found(self, factory: str, store: str, why: object) -> None:
        """Note that a store's backup of the current checkpoint is damaged, and log why."""
        with self._lock:
            if (factory, store) in self._pairs:
                return
            self._pairs[factory, store] = None
        log.error(
            "task %s: the backup of %s in %s is damaged; the next commit makes it again: %s",
            self._task,
            store,
            factory,
            why,
        )
        self._changed()

    def checked(self, suspicion: int, found: Mapping[tuple[str, str], str]) -> None:
        """Note that everything was checked since a suspicion."""
        with self._lock:
            self._answered = max(self._answered, suspicion)
        for (factory, store), why in found.items():
            self.found(factory, store, why)

    def note(self, restored: Iterable[StoreRestore]) -> None:
        """Note the damage that a restore met."""
        for one in restored:
            for factory in one.damaged:
                self.found(factory, one.store, one.reasons.get(factory, "it could not be restored"))
            if one.unreachable:
                self.suspect()

    def repaired(self, pairs: Collection[tuple[str, str]]) -> None:
        """Note that a checkpoint with new backups of these pairs was published."""
        with self._lock:
            for pair in pairs:
                self._pairs.pop(pair, None)


def find_damage(services: Services, task: str, checkpoint: Checkpoint) -> Mapping[tuple[str, str], str]:
    """Check that every blob exists that a restore from the checkpoint needs, in all backends of the job.

    Costs a GET for each index that this process has not read yet, and a HEAD for each blob.

    Returns: (factory, store) → what is missing or corrupt.
    Raises: RetryableError, AccessDenied: a blob or index could not be checked.
    """
    found: dict[tuple[str, str], str] = {}
    needed: dict[str, list[tuple[str, str]]] = {}
    for name, store in services.config.stores.items():
        for factory in store.backup_factories:
            marker, manager = checkpoint.marker(factory, name), services.backup_manager(factory)
            if marker is None:
                continue
            try:
                for blob_id in manager.referenced_blobs(services.identity(task, name), marker) or ():
                    needed.setdefault(blob_id, []).append((factory, name))
            except (MissingError, CorruptError) as error:
                found[factory, name] = str(error)
    for blob_id, problem in (services.transfer().absent(needed) if needed else {}).items():
        if not isinstance(problem, MissingBlob):
            raise problem
        found |= dict.fromkeys(needed[blob_id], f"{blob_id} is missing")
    return found
