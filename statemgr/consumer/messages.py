"""Messages of a consumer loop whose keys and values are decoded with the serdes of the input."""

from __future__ import annotations

from typing import Any, Generic, cast

from confluent_kafka import Message

from statemgr.errors import AccessDenied, CorruptRecord, RetryableError
from statemgr.serdes import Serde
from statemgr.serdes.serde import K, V

_UNREAD: Any = object()
_POISON = (
    "set task.input.key.serde and task.input.value.serde to what the producer writes; to continue past such messages, "
    "catch CorruptRecord in process and send message.raw to a topic of their own"
)


class InputMessage(Generic[K, V]):
    """A message of the input. A consumer loop passes it if the input has serdes other than ``bytes``.

    ``raw`` is Kafka's own message, with the key and the value as bytes. Keys and values are decoded when they are
    first asked for, so an application can handle a message that cannot be decoded.
    """

    __slots__ = ("_key", "_key_serde", "_value", "_value_serde", "raw")

    def __init__(self, raw: Message, key_serde: Serde, value_serde: Serde) -> None:
        self.raw = raw
        self._key_serde = key_serde
        self._value_serde = value_serde
        self._key = self._value = _UNREAD

    def key(self) -> K | None:
        """The decoded key; None if the message has none.

        Raises: CorruptRecord with topic, partition and offset; RetryableError or AccessDenied, if the serde asks a
            server that does not answer.
        """
        if self._key is _UNREAD:
            self._key = self._decoded("key", self._key_serde, self.raw.key())
        return cast("K | None", self._key)

    def value(self) -> V | None:
        """The decoded value; None for a tombstone. Raises: as :meth:`key`."""
        if self._value is _UNREAD:
            self._value = self._decoded("value", self._value_serde, self.raw.value())
        return cast("V | None", self._value)

    def topic(self) -> str:
        return str(self.raw.topic())

    def partition(self) -> int:
        """Number of the source partition, which is also that of the task."""
        return cast("int", self.raw.partition())

    def offset(self) -> int:
        return cast("int", self.raw.offset())

    def timestamp(self) -> tuple[int, int]:
        """Kind of the timestamp (as confluent_kafka numbers them), and milliseconds since the epoch."""
        return self.raw.timestamp()

    def headers(self) -> list[tuple[str, bytes | None]]:
        """The headers in their order; an empty list if there are none."""
        return cast("list[tuple[str, bytes | None]]", self.raw.headers() or [])

    def _decoded(self, what: str, serde: Serde, data: bytes | None) -> Any:
        if data is None:
            return None
        try:
            return serde.deserialize(data)
        except (RetryableError, AccessDenied) as error:  # of a server that the serde asks: the message may be whole
            error.with_where(topic=self.topic(), partition=self.partition(), offset=self.offset())
            raise
        except Exception as error:  # any callable can be a serde
            reason = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
            raise CorruptRecord(
                f"the {what} of an input message is not of the serde {serde.label}: {reason}",
                hint=_POISON,
                topic=self.topic(),
                partition=self.partition(),
                offset=self.offset(),
            ) from error
