"""The local copies that an adoption leaves: each store is written to this machine while its old changelog is read, so
that the first opening here need not read a changelog again.

A copy has the ID of the state that the adoption publishes, and nothing else finds it. So a copy whose adoption is not
published is never used. An adoption that fails removes its own. What a killed one has left, the next run or opening on
this machine removes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from statemgr.errors import AccessDenied, DiskFull, StatemgrError
from statemgr.ids import task_name
from statemgr.local import ChangeWriter, bulk_writer
from statemgr.phases import Phase
from statemgr.ports import LocalDirectories, StoreIdentity
from statemgr.services import Services

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass
class LocalCopies:
    """The copies of one adoption.

    Attributes:
        attempt: begins the IDs of the states.
        wanted: whether to make copies; False from the first one that this machine has no room or no right for.
        note: why there are none; empty if there are, or none were wanted.
    """

    services: Services
    attempt: str
    wanted: bool
    note: str = ""
    _made: list[tuple[LocalDirectories, str]] = field(default_factory=list)

    def state_id(self, store: str) -> str:
        """The ID of the state of a store that was adopted from its changelog."""
        return f"{self.attempt}-{store}"

    def along(self, store: str, task: int, read: Callable[[ChangeWriter | None], T], *, whole: bool = True) -> T:
        """Make the copy of a store with ``read``, which gives every change to the writer, if there is one.

        Without room for a copy, ``read`` is called again, without a writer. ``whole``: whether it reads every change.
        Raises: as ``read``.
        """
        directories = self.services.directories(task_name(task), store)
        try:
            directories.keep_only(())  # the job has no checkpoint: what is here was left by a run that was killed
            if self.wanted and whole:
                return self._copied(self.services.identity(task_name(task), store), directories, read)
        except (AccessDenied, DiskFull) as error:  # if Kafka denies it, it does so again
            if self.wanted:
                self.note = f"there is no local copy, so that the first opening reads the changelogs: {error}"
            self.remove()
        return read(None)

    def _copied(
        self, identity: StoreIdentity, directories: LocalDirectories, read: Callable[[ChangeWriter | None], T]
    ) -> T:
        config, state_id = self.services.config.stores[identity.store], self.state_id(identity.store)
        staging = directories.staging()
        try:
            identity.announce(Phase.REPLAY)
            with bulk_writer(config.type, staging, config.rocksdb) as writer:
                found = read(writer)
            identity.announce(Phase.SWAP)
            directories.adopt(staging, state_id, None)
            self._made.append((directories, state_id))
        finally:
            directories.discard(staging)
        return found

    def remove(self) -> None:
        """Remove all copies, and make no more."""
        self.wanted = False
        for directories, state_id in self._made:
            try:
                directories.remove(state_id)
            except StatemgrError as error:
                log.warning("the local copy of state %s was not removed: %s", state_id, error)
        self._made.clear()
