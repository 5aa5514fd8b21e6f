"""Changelogs of Quix Streams.

The format is that of Quix Streams 3.28.1: ``quixstreams.models.topics.TopicManager`` names a changelog
``changelog__<consumer group>--<stream>--<store>``, ``quixstreams.state.base.PartitionTransaction`` writes the records,
and ``quixstreams.state.recovery.RecoveryPartition`` reads them. Each record names its column family in a header. A
second header has, as JSON, the offsets of the input records that it was made from. If a store has values with a time to
live, a third header marks the values that begin with their expiry: 8 bytes, big-endian, in milliseconds since the epoch
(``quixstreams.state.rocksdb.ttl_codec``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from statemgr.errors import InvalidError
from statemgr.model.origins.origin import Decoded, Decoder, OldRecord, Skip

_COLUMN_FAMILY = "__column_family__"
_PROCESSED = "__processed_tp_offsets__"
_STAMPED = "__ttl_stamped__"
_STAMP_BYTES = 8
#: The column family of the application's own keys, and the one with a note that old values have got an expiry.
_VALUES, _SYSTEM = b"default", b"__ttl_system__"
#: The store that an application uses unless it names one.
_DEFAULT_STORE = "default"


class QuixStreams:
    """Implements :class:`statemgr.model.origins.Origin`."""

    name = "quix"
    title = "Quix Streams"
    leaves_out_uncommitted = True

    def store(self, topic: str, job: str) -> str | None:
        """The part of the name after the stream; the stream itself for the default store."""
        prefix = f"changelog__{job}--"
        if not topic.startswith(prefix):
            return None
        stream, _, store = topic.removeprefix(prefix).rpartition("--")
        return re.sub(r"[^A-Za-z0-9_-]", "_", stream if stream and store == _DEFAULT_STORE else store)

    def problem(self, topic: str, settings: Mapping[str, str]) -> str | None:
        """None that the name or the settings show: the records name their column family."""
        return None

    def is_internal(self, topic: str, job: str) -> bool:
        return topic.startswith(f"repartition__{job}--")

    def decoder(self, topic: str, committed: Mapping[str, int]) -> Decoder | None:
        return _Decoder(committed)


class _Decoder:
    """Reads a changelog as Quix Streams' own recovery does, without the expiry of values."""

    def __init__(self, committed: Mapping[str, int]) -> None:
        self._committed = committed
        #: the last header of processed offsets, which all records of one commit share, and what was decided for it
        self._decided: tuple[bytes | None, bool] = (None, True)

    def __call__(self, record: OldRecord) -> Decoded:
        headers = dict(record.headers)
        family = headers.get(_COLUMN_FAMILY)
        if family == _SYSTEM:
            return Skip.BOOKKEEPING
        if family != _VALUES:
            raise _unknown(family, record.offset)
        processed = headers.get(_PROCESSED)
        if processed != self._decided[0]:
            self._decided = processed, self._is_committed(processed, record.offset)
        if not self._decided[1]:
            return Skip.UNCOMMITTED
        value = record.value
        if value is not None and headers.get(_STAMPED):
            if len(value) < _STAMP_BYTES:
                raise InvalidError("a value is too short for the expiry that its header promises", offset=record.offset)
            value = value[_STAMP_BYTES:]
        return record.key, value

    def _is_committed(self, header: bytes | None, offset: int) -> bool:
        """Older versions wrote no offsets, or ``null``: their records always count."""
        try:
            processed = json.loads(header) if header else None
            if processed is None:
                return True
            return all(int(last) < self._committed.get(topic, 0) for topic, last in processed.items())
        except (ValueError, TypeError, AttributeError):
            raise InvalidError(f"the header {_PROCESSED} is not a JSON object of offsets", offset=offset) from None


def _unknown(family: bytes | None, offset: int) -> InvalidError:
    if family is None:
        return InvalidError(
            f"a record has no header {_COLUMN_FAMILY}: it is not one of Quix Streams",
            hint="check the name of the topic",
            offset=offset,
        )
    return InvalidError(
        f"the store has the column family {family.decode(errors='replace')!r}, so it is one of windows, timestamps or "
        "collections: only stores of plain keys can be adopted",
        hint="name the changelogs to adopt with `statemgr adopt --changelog STORE=TOPIC`, without this one",
        offset=offset,
    )
