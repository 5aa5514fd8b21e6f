"""Codecs: models ↔ bytes, for everything that is stored or sent: Avro with the schemas of ``schemas/``. Pure.

Decoders raise CorruptRecord or CorruptBlob and nothing else, whatever the bytes; encoders raise InvalidError
when a value cannot be written. The formats are described in ``docs/format.md``.
"""

from __future__ import annotations

from statemgr.model.codecs.records import (
    KEY_TAIL_SIZE,
    VERSION_ONE_FACTORY,
    Place,
    decode_chain,
    decode_checkpoint,
    decode_index,
    decode_job,
    decode_key,
    decode_prepared,
    decode_record_v1,
    decode_task,
    encode_chain,
    encode_checkpoint,
    encode_index,
    encode_job,
    encode_key,
    encode_prepared,
    encode_record,
    encode_record_v1,
    encode_task,
    is_key,
    is_whole,
    sequence_of,
    value_headers,
    with_sequence,
)

__all__ = [
    "KEY_TAIL_SIZE",
    "VERSION_ONE_FACTORY",
    "Place",
    "decode_chain",
    "decode_checkpoint",
    "decode_index",
    "decode_job",
    "decode_key",
    "decode_prepared",
    "decode_record_v1",
    "decode_task",
    "encode_chain",
    "encode_checkpoint",
    "encode_index",
    "encode_job",
    "encode_key",
    "encode_prepared",
    "encode_record",
    "encode_record_v1",
    "encode_task",
    "is_key",
    "is_whole",
    "sequence_of",
    "value_headers",
    "with_sequence",
]
