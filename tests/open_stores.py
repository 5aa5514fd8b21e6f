"""Open stores without a broker. Tests commit them by hand, in the same way as the flows, and open them again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from statemgr import JobConfig
from statemgr.ports import CommittedDirectory
from statemgr.stores.open_store import FrozenStore, OpenStore
from statemgr.stores.store import Store
from statemgr.wiring import open_services

TASK = "Partition 0"


class CommittedStore:
    """One store of one task, and a dictionary that receives what a changelog would receive.

    Args:
        directory: the directory of the local state.
        track: whether the store feeds a changelog.
        settings: keys after ``stores.totals.``.
    """

    def __init__(self, directory: Path, *, track: bool, settings: Mapping[str, object]) -> None:
        self.config = JobConfig.from_mapping(
            {
                "job.name": "orders",
                "state.dir": str(directory),
                "stores.totals.type": "rocksdb",
                **{f"stores.totals.{key}": value for key, value in settings.items()},
            }
        )
        self.changelog: dict[bytes, bytes] = {}
        self._services = open_services(self.config)
        self._track = track
        self._committed: CommittedDirectory | None = None
        self._commits = 0
        self._open()

    def _open(self) -> None:
        services = self._services
        state_id = self._committed.state_id if self._committed else None
        self.opened = OpenStore(
            services,
            services.identity(TASK, "totals"),
            self.config.stores["totals"],
            self._committed,
            state_id,
            track_changes=self._track,
        )
        self.store = Store(self.opened, self.opened.key_serde, self.opened.value_serde)

    def freeze(self) -> FrozenStore:
        """Run the synchronous part of a commit."""
        self._commits += 1
        return self.opened.freeze(f"s{self._commits}", snapshot=True)

    def publish(self, frozen: FrozenStore) -> None:
        """Run the rest of the commit: publish and acknowledge."""
        directories = self.opened.directories
        assert frozen.staging is not None
        made = directories.finished(frozen.staging)
        self._committed = directories.adopt(frozen.staging, frozen.state_id, made.files)
        for key, value in frozen.changes or ():
            if value is None:
                self.changelog.pop(key, None)
            else:
                self.changelog[key] = value
        self.opened.acknowledged(frozen, frozen.state_id)

    def give_up(self, frozen: FrozenStore) -> None:
        """Simulate a commit that fails before its publish."""
        assert frozen.staging is not None
        self.opened.directories.discard(frozen.staging)

    def reopen(self) -> None:
        """Simulate a new owner that opens the last published state after the old owner has gone."""
        self.opened.close()
        self._open()

    def close(self) -> None:
        """Close the store and everything that it used."""
        self.opened.close()
        self._services.close()
