"""What a state backend is built from. Backends from outside get the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from statemgr.config import JobConfig
from statemgr.ids import IdSource
from statemgr.ports import BlobStore, Changelog, Clock

if TYPE_CHECKING:
    from statemgr.transfer.transfer import Transfer


@dataclass(frozen=True)
class BackendContext:
    """Configuration, time and IDs, and the adapters and a scratch directory, made when first asked for.

    ``task_directory``: task → where its local state is, below which a backend may keep a directory of its own.

    ``blobs`` is already retrying and verifying; ``transfer`` moves files over it in parallel.
    """

    config: JobConfig
    clock: Clock
    ids: IdSource
    scratch: Callable[[], Path]
    blobs: Callable[[], BlobStore]
    transfer: Callable[[], Transfer]
    task_directory: Callable[[str], Path]
    changelog: Callable[[], Changelog]
