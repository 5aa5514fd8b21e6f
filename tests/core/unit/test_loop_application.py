"""What an application passes to a consumer loop: its functions, and how messages are decoded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Message

from statemgr import InputMessage, JobConfig, StateManager
from statemgr.consumer.application import Application
from statemgr.errors import ConfigError, CorruptRecord, InvalidError
from statemgr.serdes import avro_serde, serde

ORDER = '{"type": "record", "name": "Order", "fields": [{"name": "amount", "type": "long"}]}'


def application(config: dict[str, object] | None = None, **given: Any) -> Application:
    """Return an application of a job with these additional keys."""
    options: dict[str, Any] = dict.fromkeys(("process", "process_batch", "on_open", "key_serde", "value_serde"))
    return Application.of(JobConfig.from_mapping({"job.name": "orders", **(config or {})}), **options | given)


def nothing(*_: object) -> None:
    """Process nothing."""


@pytest.mark.parametrize("given", [{}, {"process": nothing, "process_batch": nothing}])
def test_exactly_one_function(given: dict[str, Any]) -> None:
    """No function and two functions raise InvalidError."""
    with pytest.raises(InvalidError, match="either process or process_batch"):
        application(**given)


async def asynchronous(*_: object) -> None:
    """Process nothing, if somebody awaits it."""


def generator(*_: object) -> Iterator[None]:
    """Process nothing, if somebody iterates over it."""
    yield


@pytest.mark.parametrize("odd", [asynchronous, generator])
@pytest.mark.parametrize("name", ["process", "process_batch", "on_open"])
def test_functions_that_a_call_does_not_run(name: str, odd: Any) -> None:
    """Otherwise the loop would consume the input and run nothing."""
    with pytest.raises(InvalidError, match=f"{name} is a generator or a coroutine"):
        application(**{"process": None if name == "process_batch" else nothing, name: odd})


def test_a_mistyped_permission_is_refused_before_anything_is_opened() -> None:
    """The call itself fails, and not the thread that opens the first task."""
    config = JobConfig.from_mapping({"job.name": "orders", "kafka.bootstrap.servers": "localhost:1"})
    with StateManager(config) as manager, pytest.raises(TypeError, match="allow_new_store"):
        manager.loop(None, nothing, topics=["orders"], allow_new_store=True)  # type: ignore[arg-type,call-arg]


def test_plain_bytes_are_kafkas_own_message() -> None:
    """Without serdes, messages are not wrapped."""
    message = Message(topic="orders", partition=1, offset=5, key=b"k", value=b"v")
    assert application(process=nothing).message(message) is message


def test_configured_and_given_serdes() -> None:
    """The configured serdes apply unless the application passes others."""
    message = Message(topic="orders", partition=1, offset=5, key=b"k", value=b'{"amount":3}', headers=[("h", b"1")])
    config: dict[str, object] = {"task.input.key.serde": "string", "task.input.value.serde": "json"}
    found = application(config, process=nothing).message(message)
    assert isinstance(found, InputMessage)
    assert (found.key(), found.value(), found.raw.value()) == ("k", {"amount": 3}, b'{"amount":3}')
    assert found.value() is found.value(), "decoded once"
    assert (found.topic(), found.partition(), found.offset(), found.headers()) == ("orders", 1, 5, [("h", b"1")])
    found = application(config, process=nothing, value_serde=(str.encode, bytes.decode)).message(message)
    assert found.value() == '{"amount":3}'


def test_avro_values() -> None:
    """The serde uses the schemas of the configuration, and schemas and serde need each other."""
    config: dict[str, object] = {"task.input.value.serde": "avro", "task.input.value.avro.schemas": [ORDER]}
    message = Message(topic="orders", partition=0, offset=0, value=avro_serde([ORDER]).serialize({"amount": 7}))
    assert application(config, process=nothing).message(message).value() == {"amount": 7}
    with pytest.raises(ConfigError, match=r"task.input.value.avro.schemas is not set"):
        application({"task.input.value.serde": "avro"}, process=nothing)
    with pytest.raises(ConfigError, match=r"task.input.value.serde is bytes"):
        application({"task.input.value.avro.schemas": [ORDER]}, process=nothing)


@pytest.mark.parametrize("which", ["json", (str.encode, bytes.decode)])
def test_a_message_that_cannot_be_decoded(which: Any) -> None:
    """FAULT 22: the error has topic, partition and offset. A valid key of the same message can still be decoded."""
    message: InputMessage[str, Any] = InputMessage(
        Message(topic="orders", partition=2, offset=77, key=b"k", value=b"\xff{"), serde("string"), serde(which)
    )
    for _ in range(2):
        with pytest.raises(CorruptRecord, match="the value of an input message") as caught:
            message.value()
        assert caught.value.where == {"topic": "orders", "partition": 2, "offset": 77}
    assert message.key() == "k"


def test_a_tombstone_and_no_key_are_none() -> None:
    """The serde is not called."""
    message: InputMessage[Any, Any] = InputMessage(Message(topic="t"), serde("json"), serde("integer"))
    assert message.key() is None
    assert message.value() is None
