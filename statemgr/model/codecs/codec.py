"""Codecs: models ↔ bytes, for all that is stored or sent. Pure.

Decoders raise CorruptRecord or CorruptBlob and nothing else, whatever the bytes; encoders raise InvalidError
when a value cannot be written. The formats are described in ``docs/format.md``.
"""

from __future__ import annotations

from statemgr.model.codecs.chain import decode_chain, encode_chain
from statemgr.model.codecs.checkpoint import (
    Place,
    decode_checkpoint,
    decode_job,
    decode_task,
    encode_checkpoint,
    encode_job,
    encode_record,
    encode_task,
)
from statemgr.model.codecs.commit import decode_prepared, encode_prepared
from statemgr.model.codecs.index import decode_index, encode_index
from statemgr.model.codecs.key import KEY_TAIL_SIZE, decode_key, encode_key, is_whole, sequence_of
from statemgr.model.codecs.version_one import VERSION_ONE_FACTORY, decode_record_v1, encode_record_v1

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
    "is_whole",
    "sequence_of",
]
