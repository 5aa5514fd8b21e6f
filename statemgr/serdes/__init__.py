"""Serdes, which turn an application's values into a store's bytes and back. Pure, except that schemas may be in files.

There are ``bytes``, ``string`` (UTF-8), ``integer`` (8 bytes, big-endian, with the sign bit flipped so that bytes sort
as numbers), ``json`` (compact, sorted keys), ``msgpack`` and, for values, ``avro``. Keys with times have the serdes of
:mod:`statemgr.serdes.windows`, with the serde of the keys inside in parentheses. Any pair of callables is a serde too.
A serde raises InvalidError for a value that it cannot write, and CorruptError for bytes that it cannot read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, Literal

from statemgr.config import JobConfig, StoreConfig
from statemgr.config.keys import WINDOW_SERDES
from statemgr.errors import ConfigError, CorruptError, InvalidError
from statemgr.serdes.serde import PAIR, Serde, T
from statemgr.serdes.windows import QuixKey, SessionKey, WindowKey, parts_of, prefix_of, windowed

__all__ = [
    "SERDES",
    "QuixKey",
    "Serde",
    "SerdeLike",
    "SerdeName",
    "SessionKey",
    "TypedSerde",
    "WindowKey",
    "avro_serde",
    "input_value_serde",
    "key_serde",
    "prefix_of",
    "serde",
    "value_serde",
    "windowed",
]

#: The serdes that need no schemas.
SerdeName = Literal[
    "bytes",
    "string",
    "integer",
    "json",
    "msgpack",
    "kafka-streams-window",
    "kafka-streams-session",
    "quix-window",
    "quix-timestamp",
]
#: A Serde, or a pair of callables (value → bytes, bytes → value).
TypedSerde = Serde[T] | tuple[Callable[[T], bytes], Callable[[bytes], T]]
#: A name, a Serde, or a pair of callables.
SerdeLike = SerdeName | TypedSerde[Any]

_SIGN = 1 << 63

_WRONG_SERDE = "use the serde that wrote it"


def _integer(value: int) -> bytes:
    try:
        return (index(value) + _SIGN).to_bytes(8, "big")
    except TypeError:
        raise InvalidError(f"the serde integer takes whole numbers, not {type(value).__name__}") from None
    except OverflowError:
        raise InvalidError("the serde integer takes signed numbers of 64 bits: this one is larger") from None


def _from_integer(data: bytes) -> int:
    if len(data) != 8:
        raise CorruptError(f"an integer is 8 bytes, not {len(data)}", hint=_WRONG_SERDE)
    return int.from_bytes(data, "big") - _SIGN


def _string(value: str) -> bytes:
    try:
        return str.encode(value)
    except TypeError:
        raise InvalidError(f"the serde string takes text, not {type(value).__name__}") from None
    except UnicodeEncodeError:
        raise InvalidError("a text with half a surrogate pair cannot be written as UTF-8") from None


def _from_string(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptError(f"a text is not UTF-8 at byte {error.start}", hint=_WRONG_SERDE) from None


def _json(value: Any) -> bytes:
    try:
        # NaN and infinity have no form in JSON
        text = json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidError(f"a value cannot be written as JSON: {_reason(error)}") from None


def _from_json(data: bytes) -> Any:
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"a value is not JSON: {_reason(error)}", hint=_WRONG_SERDE) from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _reason(error: Exception) -> str:
    # the other texts may repeat the value
    return str(error) if isinstance(error, json.JSONDecodeError | TypeError) else type(error).__name__


def _same(data: bytes) -> bytes:
    return data


SERDES: Mapping[str, Serde[Any]] = {
    "bytes": Serde(_same, _same, "bytes"),
    "string": Serde(_string, _from_string, "string"),
    "integer": Serde(_integer, _from_integer, "integer"),
    "json": Serde(_json, _from_json, "json"),
}


def serde(which: str | TypedSerde[Any]) -> Serde[Any]:
    """The serde for a name, a pair of callables, or a Serde. Raises: ConfigError for anything else, and for avro."""
    if isinstance(which, Serde):
        return which
    if isinstance(which, tuple) and 2 <= len(which) <= 4:  # it may have a name and a version too
        return Serde(*which)
    if not isinstance(which, str):
        raise ConfigError(f"{type(which).__name__} is not a serde", hint=PAIR)
    if which == "msgpack":
        # msgpack is imported only if it is used
        from statemgr.serdes.messagepack import MESSAGEPACK

        return MESSAGEPACK
    if which == "avro":
        raise ConfigError(
            "the serde avro needs schemas", hint="set stores.<name>.value.avro.schemas, or pass avro_serde(schemas)"
        )
    if (parts := parts_of(which)) is not None:
        kind, inner = parts
        return windowed(kind, serde(inner))
    if which not in SERDES:
        hint = f"choose one of {', '.join(SERDES)}, msgpack, avro, {', '.join(WINDOW_SERDES)}, or a pair of callables"
        raise ConfigError(f"unknown serde {which!r}", hint=hint)
    return SERDES[which]


def key_serde(store: StoreConfig) -> Serde:
    """The configured serde of a store's keys."""
    return serde(store.key_serde)


def avro_serde(schemas: Sequence[str]) -> Serde:
    """See :func:`statemgr.serdes.avro.avro_serde`, whose library is loaded only now."""
    from statemgr.serdes import avro

    return avro.avro_serde(schemas)


def value_serde(store: StoreConfig) -> Serde:
    """The configured serde of a store's values. Raises: ConfigError if its schemas cannot be read."""
    return avro_serde(store.avro_schemas) if store.value_serde == "avro" else serde(store.value_serde)


def input_value_serde(config: JobConfig) -> Serde:
    """The configured serde of the values of a consumer loop's input. Raises: as :func:`value_serde`."""
    return avro_serde(config.input_schemas()) if config.input_value_serde == "avro" else serde(config.input_value_serde)
