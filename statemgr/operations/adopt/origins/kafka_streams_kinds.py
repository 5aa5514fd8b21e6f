"""Kinds of stores of Kafka Streams, by the records of their changelogs. Pure.

The format is that of Kafka Streams 4.3.1 (package ``org.apache.kafka.streams.state.internals``). The key of a window
ends with its start and a sequence number (``WindowKeySchema``), that of a session with its end and its start
(``SessionKeySchema``), times in milliseconds. Their values are plain, with and without timestamps and headers
(``ChangeLoggingTimestampedWindowBytesStoreWithHeaders``, ``ChangeLoggingSessionBytesStoreWithHeaders``), and the order
of a store's own files does not matter (``RocksDBTimeOrderedWindowSegmentedBytesStore.getWriteBatches``). A versioned
store writes each version with the version's time as the timestamp of the record, in any order
(``ChangeLoggingVersionedKeyValueBytesStore``). The records of suppressed results have their version in a header
(``InMemoryTimeOrderedKeyValueChangeBuffer``). A subscription has both keys in one, and the version and the instruction
at the beginning of its value (``CombinedKeySchema``, ``SubscriptionWrapperSerde``). The key of a row that an outer join
has not matched begins with its time and its side (``TimestampedKeyAndJoinSideSerializer``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from statemgr.errors import InvalidError
from statemgr.operations.adopt.origins.kind import PLAIN, Decoded, Decoder, Kind, Looks, OldRecord, Skip
from statemgr.serdes.windows import window_bytes

#: Times are smaller than this: it is in the year 2248.
_TIMES = 1 << 43
_WINDOW, _SESSION = "kafka-streams-window", "kafka-streams-session"
_OWN = "its records have a format of Kafka Streams alone"


def _is_time(of: bytes) -> bool:
    return len(of) == 8 and int.from_bytes(of, "big") < _TIMES


def _window(record: OldRecord) -> bool:
    return _is_time(record.key[-12:-4]) and record.key[-4] < 0x80


def _session(record: OldRecord) -> bool:
    end, start = record.key[-16:-8], record.key[-8:]
    return _is_time(end) and _is_time(start) and start <= end


def _suppressed(record: OldRecord) -> bool | None:
    if record.value is None:
        return None
    return dict(record.headers).get("v") in (b"\1", b"\2", b"\3")


def _subscription(record: OldRecord) -> bool | None:
    foreign, value = int.from_bytes(record.key[:4], "big"), record.value
    if not 4 + foreign <= len(record.key):
        return False
    if value is None:
        return None
    primary = record.key[4 + foreign :]
    start = 2 if value[:1] >= b"\x80" else 18  # without or with a hash
    ends = b"" if value[:1] in (b"\0", b"\x80") else value[-4:]  # from version 1 on, a number of a partition
    return len(value) >= start and value[start:] == primary + ends and value[1] <= 3


def _unmatched(record: OldRecord) -> bool | None:
    if not (_is_time(record.key[:8]) and record.key[8:9] in (b"\0", b"\1")):
        return False
    return None if record.value is None else record.value[:1] in (b"\0", b"\1")


def _with_times(serde: str, looks: Looks, start: slice, last: slice) -> Callable[[Mapping[str, int]], Decoder]:
    """What makes decoders of keys with times. ``start``, ``last``: where in a key the two numbers are."""
    inner = slice(min(start.start, last.start))

    def decode(record: OldRecord) -> Decoded:
        if not looks(record):
            raise _other(record, serde.rpartition("-")[2])
        key = record.key
        numbers = int.from_bytes(key[start], "big"), int.from_bytes(key[last], "big")
        return window_bytes(serde, key[inner], *numbers), record.value

    return lambda committed: decode


def _versions(committed: Mapping[str, int]) -> Decoder:
    newest: dict[bytes, int] = {}

    def decode(record: OldRecord) -> Decoded:
        if record.timestamp_ms < newest.get(record.key, record.timestamp_ms):
            return Skip.OLDER
        newest[record.key] = record.timestamp_ms
        return record.key, record.value

    return decode


def _other(record: OldRecord, what: str) -> InvalidError:
    return InvalidError(
        f"the key {record.key[:40]!r} is not that of a {what}",
        hint="confirm another kind with `statemgr adopt --confirm STORE=KIND`, or name the changelogs to adopt with "
        "`statemgr adopt --changelog STORE=TOPIC`, without this one",
        offset=record.offset,
    )


def _time_at(start: int, end: int) -> Callable[[OldRecord], int]:
    return lambda record: int.from_bytes(record.key[start:end], "big")


#: By name. The first one is what a store is if nothing tells otherwise.
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        PLAIN,
        Kind(
            name="windows",
            title="windows",
            looks=_window,
            decoder=_with_times(_WINDOW, _window, slice(-12, -4), slice(-4, None)),
            key_serde=_WINDOW,
            time_ms=_time_at(-12, -4),
        ),
        Kind(
            name="sessions",
            title="sessions",
            looks=_session,
            decoder=_with_times(_SESSION, _session, slice(-8, None), slice(-16, -8)),
            key_serde=_SESSION,
            time_ms=_time_at(-16, -8),
        ),
        Kind(
            name="versioned",
            title="several versions of each value",
            decoder=_versions,
            remembers=True,
            left_behind="the older versions of its values, and the times of all versions",
        ),
        Kind(
            name="suppressed",
            title="suppressed results",
            looks=_suppressed,
            refused=f"{_OWN}; the new job does not emit the results that it holds back",
        ),
        Kind(
            name="subscriptions",
            title="the subscriptions of a foreign-key join",
            looks=_subscription,
            refused=_OWN,
        ),
        Kind(
            name="unmatched",
            title="the rows that an outer or left join of streams has not matched",
            looks=_unmatched,
            refused=_OWN,
        ),
    )
}
