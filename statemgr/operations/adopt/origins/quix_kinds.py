"""Kinds of stores of Quix Streams, by the records of their changelogs. Pure.

The format is that of Quix Streams 3.28.1 (package ``quixstreams.state``). ``base.PartitionTransaction`` writes the
records, and ``recovery.RecoveryPartition`` reads them. Each record names its column family in a header. A second header
has, as JSON, the offsets of the input records that it was made from. If a store has values with a time to live, a third
header marks the values that begin with their expiry: 8 bytes, big-endian, in milliseconds since the epoch
(``rocksdb.ttl_codec``).

Keys are ``<message key>|<key>``, without the ``|`` if the message's key is empty. In a store of windows the key is
``<start>|<end>``, in one of rows by time ``<time>|<counter>``, each number in 8 bytes, big-endian
(``rocksdb.windowed.transaction``, ``rocksdb.timestamped``). A store of windows has the newest time of each key's rows
in a second column family, and the rows of windows that collect them in a third one. Its other column families are
indexes: which windows were closed or deleted last, which the newest time tells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from statemgr.errors import InvalidError
from statemgr.operations.adopt.origins.kind import PLAIN, Decoded, Decoder, Kind, OldRecord, Skip, Unproved
from statemgr.serdes.windows import window_bytes

_COLUMN_FAMILY = "__column_family__"
_PROCESSED = "__processed_tp_offsets__"
_STAMPED = "__ttl_stamped__"
_STAMP_BYTES = 8
#: The expiry of a value that never expires, here and in Quix Streams.
_NEVER = b"\xff" * _STAMP_BYTES
#: Column families: the application's own keys; a note that old values have got an expiry; the newest times and the rows
#: of windows; the last number of a row; the oldest times of rows that are kept.
_DEFAULT, _SYSTEM = b"default", b"__ttl_system__"
_NEWEST, _ROWS, _COUNTER = b"__latest-timestamps__", b"__values__", b"__global-counter__"
_OLDEST = b"__min-eligible-timestamps__"
_INDEXES = (b"__expiration-index__", b"__deletion-index__", b"__value-deletion-index__")
_NEWEST_KEY = b"__latest_timestamp__"
_WINDOW, _TIMESTAMP = "quix-window", "quix-timestamp"
_NUMBERS_BYTES = 17
#: Times are smaller than this.
_MOST = 1 << 62
#: Column family → the key of the new store for one of its records, or that there is none.
_Takes = Mapping[bytes, Callable[[OldRecord], bytes | Skip]]


def _family(record: OldRecord) -> bytes | None:
    return next((value for name, value in record.headers if name == _COLUMN_FAMILY), None)


def _parts(key: bytes) -> tuple[bytes, int, int] | None:
    """The message's key and two numbers; None for a key of another form."""
    prefix, numbers = key[:-_NUMBERS_BYTES], key[-_NUMBERS_BYTES:]
    if len(numbers) != _NUMBERS_BYTES or numbers[8:9] != b"|" or (prefix and prefix[-1:] != b"|"):
        return None
    one, other = int.from_bytes(numbers[:8], "big"), int.from_bytes(numbers[9:], "big")
    return (prefix[:-1], one, other) if max(one, other) < _MOST else None


def _window(record: OldRecord) -> bool | None:
    """A window ends after its start, or with it if it is a session of one row."""
    family = _family(record)
    if family == _DEFAULT:
        parts = _parts(record.key)
        return None if parts is not None and parts[1] <= parts[2] else False
    return True if family == _NEWEST else None if family in (_ROWS, _COUNTER, *_INDEXES) else False


def _row_of_window(record: OldRecord) -> bool | None:
    return True if _family(record) == _ROWS else _window(record) and None


def _row_by_time(record: OldRecord) -> bool | None:
    family = _family(record)
    if family == _DEFAULT:
        return None if _parts(record.key) is not None else False
    return True if family == _OLDEST else None if family == _COUNTER else False


class _Decoder:
    """Reads a changelog as Quix Streams' own recovery does.

    Args:
        committed: topic → next offset that the old job would have read in the partition of the same number.
        takes: what becomes of the records of each column family.
        keeps_expiry: whether the values of the new store begin with their expiry.
    """

    def __init__(
        self,
        committed: Mapping[str, int],
        takes: _Takes,
        *,
        keeps_expiry: bool = False,
    ) -> None:
        self._committed, self._takes, self._keeps_expiry = committed, takes, keeps_expiry
        #: the last header of processed offsets, which all records of one commit share, and what was decided for it
        self._decided: tuple[bytes | None, bool | None] = (None, None)

    def __call__(self, record: OldRecord) -> Decoded:
        headers = dict(record.headers)
        take = self._takes.get(headers.get(_COLUMN_FAMILY) or b"")
        if take is None:
            raise _unknown(headers.get(_COLUMN_FAMILY), record.offset)
        key = take(record)
        if isinstance(key, Skip):
            return key
        processed = headers.get(_PROCESSED)
        if processed != self._decided[0]:
            self._decided = processed, self._is_committed(processed, record.offset)
        if self._decided[1] is False:
            return Skip.UNCOMMITTED
        value = record.value
        if value is not None:
            stamp = _NEVER
            if headers.get(_STAMPED):
                if len(value) < _STAMP_BYTES:
                    short = "a value is too short for the expiry that its header promises"
                    raise InvalidError(short, offset=record.offset)
                stamp, value = value[:_STAMP_BYTES], value[_STAMP_BYTES:]
            value = stamp + value if self._keeps_expiry else value
        return Unproved(key, value) if self._decided[1] is None else (key, value)

    def _is_committed(self, header: bytes | None, offset: int) -> bool | None:
        """None: the record does not say. Older versions wrote no offsets, or ``null``: their records always count."""
        try:
            processed = json.loads(header) if header else None
            if processed is None:
                return None
            last_offsets = {topic: int(last) for topic, last in processed.items()}
        except (ValueError, OverflowError, TypeError, AttributeError):
            raise InvalidError(f"the header {_PROCESSED} is not a JSON object of offsets", offset=offset) from None
        if any(last >= self._committed[topic] for topic, last in last_offsets.items() if topic in self._committed):
            return False
        for topic in last_offsets.keys() - self._committed.keys():
            raise InvalidError(
                f"a record was made from {topic}, and the old job has no offset of its partition there: whether it had "
                "committed that input is unknown",
                hint=f"give the offset with `statemgr adopt --offset {topic}-PARTITION=OFFSET`: 0 leaves all such "
                "records out, the end of the partition takes them all",
                offset=offset,
            )
        return True


def _as_it_is(record: OldRecord) -> bytes:
    return record.key


def _bookkeeping(record: OldRecord) -> Skip:
    return Skip.BOOKKEEPING


def _with_times(serde: str) -> Callable[[OldRecord], bytes]:
    def key(record: OldRecord) -> bytes:
        parts = _parts(record.key)
        if parts is None:
            raise InvalidError(f"the key {record.key[:40]!r} does not end with two times", offset=record.offset)
        return window_bytes(serde, *parts)

    return key


def _newest(record: OldRecord) -> bytes | Skip:
    """The entry with the newest time of a key. That of a whole partition is no key's."""
    if record.key == _NEWEST_KEY:
        return Skip.BOOKKEEPING
    return window_bytes(_WINDOW, record.key.removesuffix(b"|" + _NEWEST_KEY), -1, -1)


def _decoder(takes: _Takes) -> Callable[[Mapping[str, int]], Decoder]:
    return lambda committed: _Decoder(committed, takes)


def _unknown(family: bytes | None, offset: int) -> InvalidError:
    if family is None:
        return InvalidError(
            f"a record has no header {_COLUMN_FAMILY}: it is not one of Quix Streams",
            hint="check the name of the topic",
            offset=offset,
        )
    return InvalidError(
        f"the store has the column family {family.decode(errors='replace')!r}, which this kind of store does not have",
        hint="name the changelogs to adopt with `statemgr adopt --changelog STORE=TOPIC`, without this one",
        offset=offset,
    )


_PLAIN_FAMILIES: _Takes = {_DEFAULT: _as_it_is, _SYSTEM: _bookkeeping}
_OTHERS: _Takes = dict.fromkeys((_ROWS, _COUNTER, *_INDEXES), _bookkeeping)

#: By name. The first one is what a store is if nothing tells otherwise.
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        replace(
            PLAIN,
            decoder=_decoder(_PLAIN_FAMILIES),
            with_expiry=lambda committed: _Decoder(committed, _PLAIN_FAMILIES, keeps_expiry=True),
        ),
        Kind(
            name="windows",
            title="windows",
            looks=_window,
            is_named=True,
            decoder=_decoder({_DEFAULT: _with_times(_WINDOW), _NEWEST: _newest, **_OTHERS}),
            key_serde=_WINDOW,
            left_behind="the times by which a whole partition closes windows (closing_strategy, sessions), indexes, "
            "and rows that windows collect, unless they are a store of their own (kind rows)",
        ),
        Kind(
            name="rows",
            title="the rows that windows collect",
            looks=_row_of_window,
            is_named=True,
            decoder=_decoder(
                {**_OTHERS, _DEFAULT: _bookkeeping, _NEWEST: _bookkeeping, _ROWS: _with_times(_TIMESTAMP)}
            ),
            key_serde=_TIMESTAMP,
        ),
        Kind(
            name="timestamped",
            title="rows by time",
            looks=_row_by_time,
            is_named=True,
            decoder=_decoder({_DEFAULT: _with_times(_TIMESTAMP), _OLDEST: _bookkeeping, _COUNTER: _bookkeeping}),
            key_serde=_TIMESTAMP,
        ),
    )
}
