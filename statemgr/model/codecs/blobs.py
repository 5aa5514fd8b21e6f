"""Codecs of snapshot indexes and segment chains, which are in blobs, and of prepared commits. Pure.

A decoded value is well formed, but not yet trusted: see ``snapshot.validate`` and ``chain.validate_chain``.
"""

from __future__ import annotations

from statemgr.errors import ANOTHER_COPY, CorruptBlob, CorruptRecord, InvalidError
from statemgr.model.chain import MAX_CHAIN_SIZE, SegmentChain
from statemgr.model.codecs.generic import Codec, Refuse
from statemgr.model.codecs.special_types import SHAPES
from statemgr.model.commit import PreparedCommit
from statemgr.model.snapshot import MAX_INDEX_SIZE, SnapshotIndex

_INDEX = Codec("snapshot_index.v1", SnapshotIndex, SHAPES, MAX_INDEX_SIZE)
_CHAIN = Codec("segment_chain.v1", SegmentChain, SHAPES, MAX_CHAIN_SIZE)
_PREPARED = Codec("prepared_commit.v1", PreparedCommit, SHAPES)


def encode_index(index: SnapshotIndex) -> bytes:
    """The content of an index blob. Raises: InvalidError if it does not fit the schema or the limit."""
    return _INDEX.encode(index, store=index.store)


def decode_index(data: bytes, blob_id: str | None = None) -> SnapshotIndex:
    """Raises: CorruptBlob naming the blob."""
    return _INDEX.decode(data, _refuser("index blob", blob_id))


def encode_chain(chain: SegmentChain) -> bytes:
    """The bytes of a chain. Raises: InvalidError if it does not fit the schema or the limit."""
    return _CHAIN.encode(chain, store=chain.store)


def decode_chain(data: bytes, blob_id: str | None = None) -> SegmentChain:
    """``blob_id``: the blob of the chain, None if it was inline. Raises: CorruptBlob."""
    chain = _CHAIN.decode(data, _refuser("segment chain", blob_id or "inline"))
    return chain if blob_id is None else chain.lying_in(blob_id)


def encode_prepared(prepared: PreparedCommit) -> bytes:
    """Raises: InvalidError if its changes are still local, because it was not prepared to leave its process."""
    for name, store in prepared.stores.items():
        for changes in store.changes.values():
            if changes.local is not None or (changes.inline is None) == (changes.blob is None):
                raise InvalidError("changes that leave their process must be either inline or in a blob", store=name)
    return _PREPARED.encode(prepared, task=prepared.task)


def decode_prepared(data: bytes) -> PreparedCommit:
    """Raises: CorruptRecord."""

    def refuse(why: str) -> CorruptRecord:
        hint = "prepare and publish commits with the same version of statemgr"
        return CorruptRecord(f"prepared commit refused: {why}", hint=hint)

    return _PREPARED.decode(data, refuse)


def _refuser(what: str, blob_id: str | None) -> Refuse:
    return lambda why: CorruptBlob(f"{what} refused: {why}", blob=blob_id, hint=ANOTHER_COPY)
