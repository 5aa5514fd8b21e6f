"""Segment chains ↔ bytes. Pure."""

from __future__ import annotations

from statemgr.errors import ANOTHER_COPY, CorruptBlob, InvalidError
from statemgr.model.chain import MAX_CHAIN_SIZE, ChainSegment, ChainSnapshot, SegmentChain
from statemgr.model.codecs.parts import (
    Avro,
    blob_from_avro,
    blob_to_avro,
    optional_blob_from_avro,
    optional_blob_to_avro,
)
from statemgr.model.codecs.wire import decode, encode


def encode_chain(chain: SegmentChain) -> bytes:
    """The bytes of a chain. Raises: InvalidError when it fits neither the schema nor the limit."""
    snapshot = chain.snapshot
    data = encode(
        "segment_chain.v1",
        {
            "job_name": chain.job_name,
            "job_id": chain.job_id,
            "task": chain.task,
            "store": chain.store,
            "state_id": chain.state_id,
            "attempt": chain.attempt,
            "lineage": chain.lineage,
            "created_ms": chain.created_ms,
            "snapshot": {"index": blob_to_avro(snapshot.index), "state_id": snapshot.state_id, "end": snapshot.end},
            "segments": [_segment_to_avro(segment) for segment in chain.segments],
            "added": list(chain.added),
        },
    )
    if len(data) > MAX_CHAIN_SIZE:
        raise InvalidError(f"a segment chain of {len(data)} bytes is over {MAX_CHAIN_SIZE}", store=chain.store)
    return data


def decode_chain(data: bytes, blob_id: str | None = None) -> SegmentChain:
    """Decode a chain: well formed then, but not yet trusted (see ``chain.validate_chain``).

    Args:
        blob_id: the blob that it lies in, None when it was inline.

    Raises: CorruptBlob.
    """

    def refuse(why: str) -> CorruptBlob:
        return CorruptBlob(
            f"segment chain refused: {why}",
            blob=blob_id or "inline",
            hint=ANOTHER_COPY,
        )

    if len(data) > MAX_CHAIN_SIZE:
        raise refuse(f"it is larger than {MAX_CHAIN_SIZE} bytes")
    value = decode("segment_chain.v1", data, refuse)
    snapshot = value["snapshot"]
    try:
        chain = SegmentChain(
            job_name=value["job_name"],
            job_id=value["job_id"],
            task=value["task"],
            store=value["store"],
            state_id=value["state_id"],
            attempt=value["attempt"],
            lineage=value["lineage"],
            created_ms=value["created_ms"],
            snapshot=ChainSnapshot(blob_from_avro(snapshot["index"]), snapshot["state_id"], snapshot["end"]),
            segments=tuple(_segment_from_avro(segment) for segment in value["segments"]),
            added=tuple(value["added"]),
        )
    except ValueError as error:
        raise refuse(str(error)) from error
    return chain if blob_id is None else chain.lying_in(blob_id)


def _segment_to_avro(segment: ChainSegment) -> Avro:
    return {
        "first": segment.first,
        "end": segment.end,
        "blob": optional_blob_to_avro(segment.blob),
        "inline": segment.inline,
    }


def _segment_from_avro(value: Avro) -> ChainSegment:
    if (value["blob"] is None) == (value["inline"] is None):
        raise ValueError(f"the segment from change {value['first']} needs exactly one of inline and blob")
    return ChainSegment(value["first"], value["end"], optional_blob_from_avro(value["blob"]), value["inline"])
