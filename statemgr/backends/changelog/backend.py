"""The ``kafka-changelog`` backend: each store's changes on a compacted topic, one partition per task."""

from __future__ import annotations

from statemgr.backends.changelog.backup import ChangelogBackup
from statemgr.backends.changelog.restore import ChangelogRestore
from statemgr.ports import BackupManager, RestoreManager
from statemgr.services import Services


class KafkaChangelogBackend:
    """Implements :class:`statemgr.ports.StateBackend`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def backup_manager(self) -> BackupManager:
        """The manager that sends changes in the publishing transaction."""
        return ChangelogBackup(self._services)

    def restore_manager(self) -> RestoreManager:
        """The manager that replays the changelog up to the marker."""
        return ChangelogRestore(self._services)

    def close(self) -> None:
        """Does nothing: the Kafka clients belong to the services."""
