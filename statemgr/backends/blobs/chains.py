"""Reading segment chains: from their markers, verified, validated, and the last few remembered.

I/O through the transfer engine.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from statemgr.errors import CorruptBlob, MissingState
from statemgr.model.chain import MAX_CHAIN_SIZE, SegmentChain, validate_chain
from statemgr.model.checkpoint import ChainMarker, Marker
from statemgr.model.codecs import decode_chain
from statemgr.model.snapshot import blob_id_problem
from statemgr.ports import StoreIdentity
from statemgr.transfer.transfer import Transfer

_REMEMBERED = 4096


class Chains:
    """The chains of a job's stores, by their markers. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[ChainMarker, SegmentChain] = OrderedDict()

    def get(self, transfer: Transfer, identity: StoreIdentity, marker: Marker) -> SegmentChain:
        """The chain that a marker names, which must be of this store.

        Raises: MissingState (another backend's marker), MissingBlob, CorruptBlob (wrong bytes, hostile or of another
        store), UnavailableError, AccessDenied.
        """
        where = {"job": identity.job_name, "task": identity.task, "store": identity.store}
        if not isinstance(marker, ChainMarker):
            raise MissingState(
                f"a marker of {type(marker).__name__} names no segment chain",
                hint="restore from the factory that wrote it",
                **where,
            )
        with self._lock:
            chain = self._known.get(marker)
        if chain is None:
            chain = self._read(transfer, identity, marker)
        validate(chain, identity, marker)
        self.remember(marker, chain)
        return chain

    def remember(self, marker: ChainMarker, chain: SegmentChain) -> None:
        """Keep a chain that was just written or read."""
        with self._lock:
            self._known[marker] = chain
            self._known.move_to_end(marker)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)

    def _read(self, transfer: Transfer, identity: StoreIdentity, marker: ChainMarker) -> SegmentChain:
        if marker.blob is None:
            return decode_chain(marker.inline or b"")
        blob_id = marker.blob.blob_id
        if problem := blob_id_problem(blob_id, identity.job_name, identity.job_id):
            raise CorruptBlob(f"the marker {problem}", blob=blob_id, task=identity.task, store=identity.store)
        return decode_chain(transfer.get_bytes(marker.blob, MAX_CHAIN_SIZE), blob_id)


def validate(chain: SegmentChain, identity: StoreIdentity, marker: ChainMarker) -> None:
    """Refuse a chain that is hostile or of another store. Raises: CorruptBlob."""
    validate_chain(
        chain,
        marker.blob.blob_id if marker.blob else "inline",
        job_name=identity.job_name,
        job_id=identity.job_id,
        task=identity.task,
        store=identity.store,
    )
