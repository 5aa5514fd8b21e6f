"""What an application gives to a consumer loop: its functions, and the serdes of its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any

from confluent_kafka import Message

from statemgr import serdes
from statemgr.config import JobConfig
from statemgr.consumer.messages import InputMessage
from statemgr.engine.task import Task
from statemgr.engine.timers import runs_nothing
from statemgr.errors import InvalidError
from statemgr.serdes import SERDES, Serde, SerdeLike


@dataclass(frozen=True, kw_only=True)
class Application:
    """The functions of an application. The loop calls all of them on its own thread, one at a time.

    Exactly one of ``process`` and ``process_batch`` is given. ``on_open`` is called with each task that was opened and
    restored, before its first message.
    """

    process: Callable[[Task, Any], object] | None
    process_batch: Callable[[Task, Sequence[Any]], object] | None
    on_open: Callable[[Task], object] | None
    key_serde: Serde
    value_serde: Serde

    def __post_init__(self) -> None:
        if (self.process is None) == (self.process_batch is None):
            given = "neither" if self.process is None else "both"
            raise InvalidError(
                f"a consumer loop takes either process or process_batch; it was given {given}",
                hint="process takes one message at a time, process_batch a list of messages of one task",
            )
        for name in ("process", "process_batch", "on_open"):
            given = getattr(self, name)
            if isgeneratorfunction(given) or iscoroutinefunction(given) or isasyncgenfunction(given):
                raise runs_nothing(name)

    @classmethod
    def of(
        cls,
        config: JobConfig,
        *,
        key_serde: SerdeLike | None,
        value_serde: SerdeLike | None,
        process: Callable[[Task, Any], None] | None,
        process_batch: Callable[[Task, Sequence[Any]], None] | None,
        on_open: Callable[[Task], None] | None,
    ) -> Application:
        """The functions, with the serdes that the configuration names unless others are given.

        Raises: InvalidError unless it is given exactly one of ``process`` and ``process_batch``, and for a generator or
            a coroutine; ConfigError.
        """
        return cls(
            process=process,
            process_batch=process_batch,
            on_open=on_open,
            key_serde=serdes.serde(key_serde or config.input_key_serde),
            value_serde=serdes.serde(value_serde) if value_serde else serdes.input_value_serde(config),
        )

    def message(self, message: Message) -> Message | InputMessage[Any, Any]:
        """What the application is given for a message: the message itself if its key and value are plain bytes."""
        if self.key_serde is self.value_serde is SERDES["bytes"]:
            return message
        return InputMessage(message, self.key_serde, self.value_serde)
