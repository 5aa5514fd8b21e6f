"""Codecs: models ↔ bytes, for all that is stored or sent. Pure.

Decoders raise CorruptRecord or CorruptBlob and nothing else, whatever the bytes; encoders raise InvalidError
when a value cannot be written. The formats are described in ``docs/format.md``.
"""

from __future__ import annotations

from statemgr.model.codec_chain import decode_chain, encode_chain
from statemgr.model.codec_checkpoint import (
    VERSION_ONE_FACTORY,
    decode_checkpoint,
    decode_key,
    decode_record,
    encode_checkpoint,
    encode_key,
    encode_record,
    encode_record_v1,
)
from statemgr.model.codec_commit import decode_prepared, encode_prepared
from statemgr.model.codec_index import decode_index, encode_index

__all__ = [
    "VERSION_ONE_FACTORY",
    "decode_chain",
    "decode_checkpoint",
    "decode_index",
    "decode_key",
    "decode_prepared",
    "decode_record",
    "encode_chain",
    "encode_checkpoint",
    "encode_index",
    "encode_key",
    "encode_prepared",
    "encode_record",
    "encode_record_v1",
]
