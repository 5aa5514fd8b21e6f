"""Serdes of keys with times: their bytes, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from statemgr import JobConfig
from statemgr.errors import ConfigError, CorruptError, InvalidError
from statemgr.model.keys.partitioners import candidates, crc32
from statemgr.serdes import QuixKey, Serde, SessionKey, WindowKey, key_serde, prefix_of, serde, windowed

TIME = b"\x80" + b"\x00" * 6 + b"\x07"


@pytest.mark.parametrize(
    ("name", "key", "data"),
    [
        ("kafka-streams-window", WindowKey(b"ann", 7), b"ann\x00\x01" + TIME + bytes(4)),
        ("kafka-streams-window", WindowKey(b"a\x00", -1, 258), b"a\x00\xff\x00\x01\x7f" + b"\xff" * 7 + b"\0\0\1\2"),
        ("kafka-streams-window(string)", WindowKey("ann", 7), b"ann\x00\x01" + TIME + bytes(4)),
        ("kafka-streams-session", SessionKey(b"", 7, 7), b"\x00\x01" + TIME + TIME),
        ("quix-window", QuixKey(b"ann", 7, 7), b"ann\x00\x01" + TIME + TIME),
        ("quix-timestamp(json)", QuixKey("ann", 7, 7), b'"ann"\x00\x01' + TIME + TIME),
        ("kafka-streams-session(integer)", SessionKey(7, 7, 7), b"\x80" + b"\x00\xff" * 6 + b"\7\0\1" + TIME + TIME),
    ],
)
def test_the_bytes_of_keys_with_times(name: str, key: WindowKey | SessionKey | QuixKey, data: bytes) -> None:
    """The key inside, its end, and two numbers. The name of the serde, which a checkpoint records, has that of the key
    inside."""
    config = JobConfig.from_mapping({"job.name": "job", "stores.hits.key.serde": name})
    used = key_serde(config.stores["hits"])
    assert used.serialize(key) == data
    assert used.deserialize(data) == key
    assert type(used.deserialize(data)) is type(key)
    assert used.label == name
    assert data.startswith(prefix_of(data[: -len(data) + data.index(b"\0\1")].replace(b"\0\xff", b"\0")))


@pytest.mark.parametrize(
    "wrong", ["ann", (b"ann",), (b"ann", "x"), (b"ann", 1, 2, 3), (b"ann", 1 << 63), (b"a", 1, -1), 5]
)
def test_other_keys_are_refused(wrong: object) -> None:
    """A key is refused before anything is written, and bytes of another serde are never a wrong key."""
    with pytest.raises(InvalidError, match="takes a key, its start and a number"):
        serde("kafka-streams-window").serialize(wrong)
    for data in (b"", b"ann", b"ann\x00\x01", b"ann\x00\x01" + TIME, b"ann\x00\x01" + TIME + TIME):
        with pytest.raises(CorruptError):
            serde("kafka-streams-window").deserialize(data)


def test_names_of_serdes_of_keys_with_times() -> None:
    """A serde of one's own may be inside. Values, and other names, are refused."""
    number = Serde(lambda n: n.to_bytes(8, "big", signed=True), lambda b: int.from_bytes(b, "big", signed=True), "long")
    own = windowed("kafka-streams-window", number)
    assert own.deserialize(own.serialize(WindowKey(-5, 7))) == (-5, 7, 0)
    assert own.label == "kafka-streams-window(long)"
    assert windowed("kafka-streams-window", replace(number, version=2)).label == "kafka-streams-window(long v2)"
    for key, name in [
        ("key", "kafka-streams-window(avro)"),
        ("key", "kafka-streams-window(bytes)"),
        ("key", "window"),
        ("value", "kafka-streams-window"),
    ]:
        with pytest.raises(ConfigError, match=f"stores.hits.{key}.serde"):
            JobConfig.from_mapping({"job.name": "job", f"stores.hits.{key}.serde": name})


def test_the_task_of_a_window_is_that_of_its_key() -> None:
    """A rescale finds the key of the message in the key of the window."""
    keys = [b"ann", b"a\x00b", b"", b"bob"]
    for name in ("kafka-streams-window", "kafka-streams-session(string)"):
        write = serde(name.partition("(")[0]).serialize
        windows = [write((key, 1_795_580_512_272, 0)) for key in keys]
        assert list(candidates("kafka-partition", name)["crc32"](windows)) == crc32(keys)
