"""Kinds of configuration values: what each accepts, and what the value becomes. Pure.

Every kind accepts a value of TOML's own type and a string. ``parse`` raises a ValueError that does not show the value,
because only the caller knows the key and whether its value may be shown.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from statemgr.config.factories import blob_store_of
from statemgr.config.policies import SnapshotInterval
from statemgr.config.units import MILLIS, UNITS, duration_ms, duration_text
from statemgr.ids import NAME

#: The type of a key's value after parsing. JSON has all of them.
Value = str | int | float | bool | list[str] | list[int]

#: librdkafka's numbers have 64 bits at most.
_LARGEST = (1 << 63) - 1
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")


class Kind(NamedTuple):
    """A kind of value.

    ``expected`` completes the sentence "the key must be". ``deferred``: the value may hold references
    (``${env:…}``), and is checked again when they are resolved.
    """

    expected: str
    parse: Callable[[object], Value]
    deferred: bool = False


def _string(value: object) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return _clean(value).strip()


def _clean(text: str) -> str:
    """Refuse NUL, and half a surrogate pair (UnicodeError): no file name, header or client accepts them."""
    text.encode()
    if "\0" in text:
        raise ValueError
    return text


def matching(pattern: re.Pattern[str], expected: str) -> Kind:
    """A text that the pattern matches as a whole."""

    def parse(value: object) -> str:
        text = _string(value)
        if not pattern.fullmatch(text):
            raise ValueError
        return text

    return Kind(expected, parse)


def integer(minimum: int, maximum: int, unit: str = "") -> Kind:
    """A whole number with ``minimum`` ≤ value ≤ ``maximum``."""

    def parse(value: object) -> int:
        if isinstance(value, str):
            value = int(value.strip().replace("_", ""))
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise ValueError
        return value

    suffix = f" ({unit})" if unit else ""
    return Kind(f"a whole number from {minimum} to {maximum}{suffix}", parse)


def duration(minimum: int, maximum: int, unit: str = "milliseconds") -> Kind:
    """A duration in whole ``unit``\\ s with ``minimum`` ≤ value ≤ ``maximum``: a number of them, or a text with a
    unit."""
    length = MILLIS[unit]

    def parse(value: object) -> int:
        if isinstance(value, str):
            value = duration_ms(value, unit) / length
            value = int(value) if value.denominator == 1 else None
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise ValueError
        return value

    least, most = duration_text(minimum * length), duration_text(maximum * length)
    return Kind(
        f"a duration from {least} to {most}, with a unit ({UNITS}) or as a number of {unit}",
        parse,
    )


def number(minimum: float, maximum: float) -> Kind:
    """A number with ``minimum`` ≤ value ≤ ``maximum``."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        result = float(value)
        if not math.isfinite(result) or not minimum <= result <= maximum:
            raise ValueError
        return result

    return Kind(f"a number from {minimum:g} to {maximum:g}", parse)


def _boolean(value: object) -> bool:
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower())
    if not isinstance(value, bool):
        raise ValueError
    return value


def choice(*names: str) -> Kind:
    """One of a few words."""

    def parse(value: object) -> str:
        text = _string(value)
        if text not in names:
            raise ValueError
        return text

    return Kind("one of " + ", ".join(names), parse)


def _items(value: object) -> list[object]:
    """A list, or the parts of a text between commas. An empty text is an empty list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")] if value.strip() else []
    if isinstance(value, list | tuple):
        return list(value)
    raise ValueError


def texts(item: Kind, expected: str) -> Kind:
    """A list of texts without duplicates, in the given order."""

    def parse(value: object) -> list[str]:
        result = [str(item.parse(part)) for part in _items(value)]
        if len(set(result)) != len(result):
            raise ValueError
        return result

    return Kind(expected, parse)


def numbers(allowed: tuple[int, ...], expected: str) -> Kind:
    """A list of numbers out of ``allowed``, without duplicates, in ascending order."""
    item = integer(min(allowed), max(allowed))

    def parse(value: object) -> list[int]:
        parts = _items(value) if isinstance(value, str | list | tuple) else [value]
        result = sorted(int(str(item.parse(part))) for part in parts)
        if not result or len(set(result)) != len(result) or not set(result) <= set(allowed):
            raise ValueError
        return result

    return Kind(expected, parse)


def _blob_uri(value: object) -> str:
    """Another package checks what follows the scheme of its store. Credentials are refused in every URI.

    Raises: ConfigError for a scheme without a store.
    """
    text = _string(value)
    uri = urlsplit(text)
    own = uri.scheme in ("file", "s3", "memory", "gs", "az", "abfss")
    if uri.scheme in ("az", "abfss") and {".", ".."} & set(unquote(uri.path).split("/")):
        raise ValueError  # requests would have another path than listings
    if uri.scheme == "abfss":  # container@account.dfs.core.windows.net
        is_place = re.fullmatch(r"[a-z0-9-]{3,63}@[a-z0-9]{3,24}\.dfs\.[a-z0-9.-]+", uri.netloc)
        if not is_place or uri.query or uri.fragment:
            raise ValueError
        blob_store_of(text)
        return text
    if uri.username or uri.password or uri.fragment or (own and uri.query):
        raise ValueError
    if uri.scheme == "file" and not (uri.netloc in ("", "localhost") and uri.path.startswith("/")):
        raise ValueError
    if uri.scheme in ("s3", "gs", "az") and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", uri.netloc):
        raise ValueError
    if not own and not re.match(r"[a-z][a-z0-9+.-]*://", text):
        raise ValueError
    blob_store_of(text)
    return text


def _endpoint(value: object, schemes: tuple[str, ...] = ("http", "https")) -> str:
    text = _string(value)
    uri = urlsplit(text)
    if uri.scheme not in schemes or not uri.hostname or uri.username or uri.password or uri.port == 0:
        raise ValueError  # reading the port checks it
    return text


def _registry(value: object) -> str:
    """Addresses of one registry; ``mock`` is that of its client in memory."""
    return ",".join(_endpoint(part.strip(), ("http", "https", "mock")) for part in _string(value).split(","))


def _schemas(value: object) -> list[str]:
    """Avro schemas as compact JSON, from a list of texts or from a JSON array of schemas."""
    if isinstance(value, str):
        schemas = json.loads(value)
    else:
        schemas = [json.loads(item) if isinstance(item, str) else item for item in _items(value)]
    if not isinstance(schemas, list) or not schemas:
        raise ValueError
    result = []
    from fastavro.schema import parse_schema  # few jobs need it, and it is slow to load

    for schema in schemas:
        try:
            parse_schema(schema, named_schemas={})
        except Exception:  # the parser meets arbitrary JSON; whatever it raises means the same
            raise ValueError from None
        result.append(json.dumps(schema, separators=(",", ":")))
    return result


def _client_value(value: object) -> Value:
    if isinstance(value, list | tuple):
        return ",".join(_string(part) for part in value)
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) <= _LARGEST):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, str):
        return _clean(value)
    raise ValueError


def _interval(value: object) -> list[str]:
    limits = [_string(part) for part in _items(value)]
    SnapshotInterval.parse(limits)
    return limits


TEXT = Kind("a text that is not empty", _string, deferred=True)
BOOLEAN = Kind("true or false", _boolean)
CLIENT_VALUE = Kind("a text, a number, true or false", _client_value, deferred=True)
TOPIC_SETTING = Kind("a text, a number, true or false", _client_value)
NAME_KIND = matching(NAME, "a name of letters, digits, '.', '_' and '-' (at most 128)")
TOPIC = matching(_TOPIC, "a topic's name: letters, digits, '.', '_' and '-' (at most 249)")
TOPICS = texts(TOPIC, "a list of different topics, or a text with commas")
FACTORIES = texts(TEXT, "a list of different factory names, or a text with commas")
BLOB_URI = Kind(
    "file:///directory, s3://bucket/prefix, or another URI of docs/storage.md, without credentials",
    _blob_uri,
    deferred=True,
)
AVRO_SCHEMAS = Kind("a list of Avro schemas as JSON texts, or one JSON array of them", _schemas, deferred=True)
INTERVAL = Kind("one limit of each kind, such as 50 commits, 256 MiB, 10 min", _interval)
REGISTRY = Kind("http://…, https://… or a list of them with commas, without credentials", _registry, deferred=True)
ENDPOINT = Kind("http://… or https://…, without credentials", _endpoint, deferred=True)
