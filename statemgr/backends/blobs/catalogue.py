"""Reads and verifies segment chains and snapshot indexes, and remembers the last few, which it verified before."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TypeVar

from statemgr.errors import CorruptBlob, MissingBlob, MissingState
from statemgr.model.chain import MAX_CHAIN_SIZE, SegmentChain, validate_chain
from statemgr.model.checkpoint import BlobMarker, BlobRef, Marker
from statemgr.model.codecs import decode_chain, decode_index
from statemgr.model.snapshot import MAX_INDEX_SIZE, SnapshotIndex, blob_id_problem, validate
from statemgr.ports import StoreIdentity
from statemgr.transfer.transfer import Transfer

R = TypeVar("R")
T = TypeVar("T")
log = logging.getLogger(__name__)
_CHAINS = 4096
#: This many indexes are remembered whatever their size; further ones up to this many encoded bytes of all.
_INDEXES = 16
_INDEX_BYTES = 8 * 1024 * 1024


class Catalogue:
    """The chains and indexes of a job's stores. Safe to use from many threads."""

    def __init__(self, transfer: Callable[[], Transfer]) -> None:
        self._transfer = transfer
        self._lock = threading.Lock()
        self._chains: OrderedDict[BlobMarker, SegmentChain] = OrderedDict()
        self._indexes: OrderedDict[str, tuple[BlobRef, SnapshotIndex]] = OrderedDict()
        self._index_bytes = 0

    def chain(self, identity: StoreIdentity, marker: Marker) -> SegmentChain:
        """The chain that a marker names, which must be of this store.

        Raises: MissingState (another backend's marker), MissingBlob, CorruptBlob (wrong bytes, hostile or of another
        store), UnavailableError, AccessDenied.
        """
        if not isinstance(marker, BlobMarker):
            raise MissingState(
                f"a {type(marker).__name__} names neither a snapshot nor segments",
                hint="restore with the factory that wrote it",
                **identity.where,
            )
        with self._lock:
            known = self._chains.get(marker)
            if known is not None and _owner(known) == identity:
                self._chains.move_to_end(marker)
                return known
        chain = self._read_chain(identity, marker)
        # an inline chain is remembered under the name of its snapshot's index
        validate_for(chain, identity, (marker.blob or chain.snapshot.index).blob_id)
        self.remember_chain(marker, chain)
        return chain

    def if_readable(self, identity: StoreIdentity, read: Callable[[StoreIdentity, R], T], found: R) -> T | None:
        """The result of ``read`` (:meth:`chain` or :meth:`index`). If it is missing or corrupt, logs a warning and
        returns None. Raises: UnavailableError, AccessDenied."""
        try:
            return read(identity, found)
        except (MissingBlob, CorruptBlob) as error:
            log.warning("%s: the last backup cannot be read, so everything is uploaded again: %s", identity, error)
            return None

    def remember_chain(self, marker: BlobMarker, chain: SegmentChain) -> None:
        """Keep a chain that was just written or read, and is valid."""
        with self._lock:
            self._chains[marker] = chain
            self._chains.move_to_end(marker)
            while len(self._chains) > _CHAINS:
                self._chains.popitem(last=False)

    def index(self, identity: StoreIdentity, ref: BlobRef) -> SnapshotIndex:
        """The index in a blob, which must be of this store.

        Raises: MissingBlob, CorruptBlob (wrong bytes, hostile or of another store), UnavailableError, AccessDenied.
        """
        with self._lock:
            known = self._indexes.get(ref.blob_id)
            if known is not None and known[0] == ref and _owner(known[1]) == identity:
                self._indexes.move_to_end(ref.blob_id)
                return known[1]
        index = decode_index(self._transfer().get_bytes(ref, MAX_INDEX_SIZE), ref.blob_id)
        validate_for(index, identity, ref.blob_id)
        self.remember_index(ref, index)
        return index

    def remember_index(self, ref: BlobRef, index: SnapshotIndex) -> None:
        """Keep an index that was just written or read, and is valid."""
        with self._lock:
            if ref.blob_id not in self._indexes:
                self._index_bytes += ref.size
            self._indexes[ref.blob_id] = ref, index
            self._indexes.move_to_end(ref.blob_id)
            while len(self._indexes) > _INDEXES and self._index_bytes > _INDEX_BYTES:
                self._index_bytes -= self._indexes.popitem(last=False)[1][0].size

    def forget_index(self, blob_id: str) -> None:
        """Drop an index whose blob was deleted."""
        with self._lock:
            forgotten = self._indexes.pop(blob_id, None)
            if forgotten is not None:
                self._index_bytes -= forgotten[0].size

    def needed(self, identity: StoreIdentity, marker: Marker) -> Iterator[tuple[BlobRef, int]]:
        """Everything that a restore from a marker reads, and how many bytes each takes in its blob.

        Raises: as :meth:`chain` and :meth:`index`.
        """
        chain = self.chain(identity, marker)
        if isinstance(marker, BlobMarker) and marker.blob is not None:
            yield marker.blob, marker.blob.size
        for ref in chain.blobs():
            yield ref, ref.size
        for _, file in self.index(identity, chain.snapshot.index).root.walk():
            yield from file.stored()

    def _read_chain(self, identity: StoreIdentity, marker: BlobMarker) -> SegmentChain:
        if marker.blob is None:
            return decode_chain(marker.inline or b"")
        blob_id = marker.blob.blob_id
        if problem := blob_id_problem(blob_id, identity.job_name, identity.job_id):
            raise CorruptBlob(f"the marker {problem}", blob=blob_id, task=identity.task, store=identity.store)
        return decode_chain(self._transfer().get_bytes(marker.blob, MAX_CHAIN_SIZE), blob_id)


def _owner(found: SegmentChain | SnapshotIndex) -> StoreIdentity:
    return StoreIdentity(found.job_name, found.job_id, found.task, found.store)


def validate_for(found: SegmentChain | SnapshotIndex, identity: StoreIdentity, where: str) -> None:
    """Refuse a chain or an index that is hostile or of another store; ``where`` names its blob. Raises: CorruptBlob."""
    owner = {
        "job_name": identity.job_name, "job_id": identity.job_id, "task": identity.task, "store": identity.store
    }  # fmt: skip
    if isinstance(found, SegmentChain):
        validate_chain(found, where, **owner)
    else:
        validate(found, where, **owner)
