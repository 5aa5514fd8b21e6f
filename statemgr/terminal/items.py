"""Keys and values of stores on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isfinite
from typing import TYPE_CHECKING, Any

import click

from statemgr.config import StoreConfig
from statemgr.errors import InvalidError, StatemgrError
from statemgr.terminal.output import printable

if TYPE_CHECKING:
    from statemgr.serdes import Serde

_SERDES = click.Choice(["bytes", "hex", "string", "integer", "json", "msgpack"])
key_serde_option = click.option("--key-serde", type=_SERDES, help="Default: the serde of the store.")
value_serde_option = click.option("--value-serde", type=_SERDES, help="Default: the serde of the store.")


def parse(given: str, serde_name: str, *, may_be_quoted: bool = True) -> bytes:
    """A key as bytes. ``may_be_quoted``: as :func:`text` shows one. Raises: InvalidError if it is not a key of that
    serde."""
    from statemgr.serdes import serde
    from statemgr.serdes.windows import parts_of, prefix_of

    plain = (_quoted(given) if may_be_quoted else None) or given
    try:
        if serde_name == "bytes":
            return bytes.fromhex(given[2:]) if given.startswith("0x") else plain.encode()
        if serde_name == "hex":
            return bytes.fromhex(given.removeprefix("0x"))
        if (parts := parts_of(serde_name)) is not None:
            kind, inner = parts
            key, *numbers = json.loads(given)
            is_text = isinstance(key, str) and inner not in ("json", "msgpack")
            bytes_of_key = parse(key if is_text else json.dumps(key), inner, may_be_quoted=False)
            return serde(kind).serialize((bytes_of_key, *numbers)) if numbers else prefix_of(bytes_of_key)
        readers: dict[str, Callable[[str], Any]] = {"integer": int, "json": json.loads, "msgpack": json.loads}
        read = readers.get(serde_name)
        return serde(serde_name).serialize(read(given) if read else plain)
    except (ValueError, TypeError, OverflowError, RecursionError, InvalidError):
        raise InvalidError(
            f"{given!r} is not a key of the serde {serde_name}", hint="choose another with --key-serde"
        ) from None


def render(data: bytes, serde_name: str | Serde) -> Any:
    """Bytes as a value that JSON has: of a key, what :func:`parse` reads. Raises: InvalidError if the serde cannot."""
    from statemgr.serdes import serde

    if serde_name == "hex":
        return data.hex()
    try:
        if serde_name != "bytes":
            return _for_json(serde(serde_name).deserialize(data))
        decoded = data.decode()
        return decoded if decoded.isprintable() and not decoded.startswith("0x") else f"0x{data.hex()}"
    except (ValueError, RecursionError, StatemgrError):
        if serde_name == "bytes":
            return f"0x{data.hex()}"
        raise InvalidError(
            f"the serde does not read 0x{data[:40].hex()}: {serde_name if isinstance(serde_name, str) else 'avro'}",
            hint="choose others with --key-serde and --value-serde",
        ) from None


def _for_json(value: Any) -> Any:
    """Turn what JSON does not have (bytes, dates, infinite numbers) into text."""
    if isinstance(value, dict):
        return {str(_for_json(key)): _for_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(item) for item in value]
    if isinstance(value, bytes):
        return render(value, "bytes")
    is_own = value is None or isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))
    return value if is_own else str(value)


def text(value: Any) -> str:
    """A rendered value on one line. Text with control characters is in quotes, as JSON writes it."""
    if isinstance(value, str) and value.isprintable() and _quoted(value) is None:
        return value
    return printable(json.dumps(value, ensure_ascii=False))


def _quoted(given: str) -> str | None:
    """The text that :func:`text` shows like this, if it shows it in quotes."""
    try:
        value = json.loads(given) if given.startswith('"') else None
    except ValueError:
        return None
    return value if isinstance(value, str) and text(value) == given else None


def value_serde_of(store: StoreConfig, given: str | None) -> str | Serde:
    """The serde to show values with: the one that was given, or the store's."""
    from statemgr.serdes import value_serde

    return given or (value_serde(store) if store.value_serde == "avro" else store.value_serde)
