"""Ports: what flows and engines need of the outside world, as Protocols. No I/O here.

Adapters (floor 2) implement ``Clock``, ``BlobStore``, ``CheckpointLog``, ``Publisher``, ``Changelog`` and
``LocalStore``; engines (floor 3) implement ``BackupManager`` and ``RestoreManager``.
"""

from statemgr.ports.backends import (
    Backlog,
    BackupManager,
    DirectoryNeeded,
    GuardedBackupManager,
    PreparedBackup,
    Progress,
    Restored,
    RestoreManager,
    RestoreRequest,
    SegmentBackupManager,
    StagedChanges,
    StateBackend,
    StoreIdentity,
    StoreSnapshot,
    no_progress,
)
from statemgr.ports.blobs import (
    BlobInfo,
    BlobReader,
    BlobStore,
    Body,
    FileSlice,
    UnfinishedUpload,
)
from statemgr.ports.clock import Clock, Moment
from statemgr.ports.kafka import (
    Changelog,
    ChangelogBatch,
    ChangelogRecord,
    CheckpointLog,
    IdForgotten,
    Publisher,
    TopicInfo,
    Transaction,
)
from statemgr.ports.local import (
    CommittedDirectory,
    FinishedDirectory,
    Items,
    LocalDirectories,
    LocalStore,
)

__all__ = [
    "Backlog",
    "BackupManager",
    "BlobInfo",
    "BlobReader",
    "BlobStore",
    "Body",
    "Changelog",
    "ChangelogBatch",
    "ChangelogRecord",
    "CheckpointLog",
    "Clock",
    "CommittedDirectory",
    "DirectoryNeeded",
    "FileSlice",
    "FinishedDirectory",
    "GuardedBackupManager",
    "IdForgotten",
    "Items",
    "LocalDirectories",
    "LocalStore",
    "Moment",
    "PreparedBackup",
    "Progress",
    "Publisher",
    "RestoreManager",
    "RestoreRequest",
    "Restored",
    "SegmentBackupManager",
    "StagedChanges",
    "StateBackend",
    "StoreIdentity",
    "StoreSnapshot",
    "TopicInfo",
    "Transaction",
    "UnfinishedUpload",
    "no_progress",
]
