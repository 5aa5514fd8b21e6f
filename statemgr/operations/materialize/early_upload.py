"""Uploads the tables of a build while it still replays, so that little is left to upload at its end.

Blobs of a table that is rewritten all the same are in no index, and expire.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from statemgr.backends.blobs.names import file_prefix
from statemgr.errors import StatemgrError
from statemgr.local.machine import moment
from statemgr.model.snapshot import FileIndex
from statemgr.ports import Moment, StoreIdentity
from statemgr.services import Services
from statemgr.transfer.packs import PACK_LIMIT
from statemgr.transfer.transfer import Upload

log = logging.getLogger(__name__)


class EarlyUpload:
    """Uploads files of a directory in the background, one after the other, inside a ``with`` block.

    Attributes:
        began: before the first blob was uploaded; None if there is none.
    """

    def __init__(self, services: Services, identity: StoreIdentity, directory: Path) -> None:
        self._services, self._identity, self._directory = services, identity, directory
        self._attempt = services.ids.attempt_id()
        self._pool = services.executors.pool("early-upload", 1)
        self._running: dict[str, Future[FileIndex]] = {}
        self.began: Moment | None = None

    def add(self, tables: Collection[tuple[str, int]]) -> None:
        """Upload the files that were not added before. Small ones are left to the end, when several share a blob.

        Args:
            tables: names and bytes of files that never change again.
        """
        for name, size in tables:
            if name not in self._running and size > PACK_LIMIT:
                self.began = self.began or moment(self._services.clock)
                self._running[name] = self._pool.submit(self._upload, name, size)

    def files(self) -> dict[str, FileIndex]:
        """Wait for the uploads. Returns: name → file. After a failure, the end of the build uploads the rest."""
        found: dict[str, FileIndex] = {}
        for name, running in self._running.items():
            try:
                found[name] = running.result()
            except StatemgrError as error:
                log.info("%s: %s could not be uploaded during the replay: %s", self._identity, name, error)
                self._pool.shutdown(wait=True, cancel_futures=True)
                break
        return found

    def _upload(self, name: str, size: int) -> FileIndex:
        prefix = file_prefix(self._identity, self._attempt, name)
        (done,) = self._services.transfer().upload_files([Upload(self._directory / name, size, None, prefix)])
        return done

    def __enter__(self) -> EarlyUpload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
