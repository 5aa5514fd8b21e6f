"""Kinds of stores of Kafka Streams: what their records become. The bytes are those of ``WindowKeySchema`` and such."""

from __future__ import annotations

import pytest

from statemgr.errors import InvalidError
from statemgr.model.expiry import expiry_bytes
from statemgr.operations.adopt.origins import ORIGINS, Decoder, Kind, OldRecord, Skip, expiring
from statemgr.serdes import SessionKey, WindowKey, serde

NOW = 1_795_580_512_272
KINDS = ORIGINS["kafka-streams"].kinds


def ms(at: int) -> bytes:
    """Return a time as Kafka Streams writes it."""
    return at.to_bytes(8, "big")


def record(key: bytes, value: bytes | None = b"5", timestamp_ms: int = NOW) -> OldRecord:
    """Return a record at offset 7."""
    return OldRecord(key, value, (), 7, timestamp_ms)


def decoder(kind: Kind) -> Decoder:
    """Return the decoder of one partition."""
    assert kind.decoder is not None
    return kind.decoder({})


def test_windows() -> None:
    """The key, the start and the sequence number become a WindowKey. Values and deletes stay."""
    decode, read = decoder(KINDS["windows"]), serde("kafka-streams-window").deserialize
    for key, sequence in [(b"ann", 0), (b"", 3), (b"a\0\1", 70_000)]:
        for value in (b"5", b"", None):
            made = decode(record(key + ms(NOW) + sequence.to_bytes(4, "big"), value))
            assert not isinstance(made, Skip)
            assert (read(made[0]), made[1]) == (WindowKey(key, NOW, sequence), value)


def test_sessions() -> None:
    """The key has the end first, and the SessionKey the start, so that it sorts by the start."""
    decode, read = decoder(KINDS["sessions"]), serde("kafka-streams-session").deserialize
    for key in (b"ann", b"", b"a\0\1"):
        made = decode(record(key + ms(NOW + 9) + ms(NOW)))
        assert not isinstance(made, Skip)
        assert (read(made[0]), made[1]) == (SessionKey(key, NOW, NOW + 9), b"5")


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("windows", b"plain"),
        ("windows", bytes(11)),
        ("windows", b"ann" + ms(1 << 62) + bytes(4)),
        ("windows", b"ann" + ms(NOW) + b"\xff" * 4),
        ("sessions", b"plain"),
        ("sessions", b"ann" + ms(NOW) + ms(NOW + 1)),
        ("sessions", ms(NOW)),
    ],
)
def test_records_that_are_not_of_the_kind(kind: str, key: bytes) -> None:
    """A record without the form of its kind is an error that names its offset."""
    with pytest.raises(InvalidError, match="is not that of a") as raised:
        decoder(KINDS[kind])(record(key))
    assert raised.value.where["offset"] == 7


def test_versions() -> None:
    """The newest version by its time counts, also if an older one follows it; of two with one time, the last one."""
    decode = decoder(KINDS["versioned"])
    told = [(b"a", b"1", 10), (b"a", b"0", 5), (b"b", None, 5), (b"a", b"2", 10), (b"a", None, 20), (b"a", b"3", 19)]
    made = [decode(record(*one)) for one in told]
    assert made == [(b"a", b"1"), Skip.OLDER, (b"b", None), (b"a", b"2"), (b"a", None), Skip.OLDER]
    assert KINDS["versioned"].remembers


@pytest.mark.parametrize(("kind", "tail"), [("windows", ms(NOW) + bytes(4)), ("sessions", ms(NOW) + ms(NOW - 50))])
def test_expiry(kind: str, tail: bytes) -> None:
    """The life of a window counts from its start, and that of a session from its end. At its last millisecond it is
    adopted with its expiry, and then left out; a delete is a delete."""
    time_ms = KINDS[kind].time_ms
    assert time_ms is not None
    for now_ms, lives in [(NOW + 999, True), (NOW + 1000, False)]:
        decode = expiring(decoder(KINDS[kind]), time_ms, life_ms=1000, now_ms=now_ms)
        made = decode(record(b"ann" + tail))
        assert made is Skip.EXPIRED if not lives else made[1] == expiry_bytes(NOW + 1000) + b"5"  # type: ignore[index]
        assert decode(record(b"ann" + tail, None))[1] is None  # type: ignore[index]
