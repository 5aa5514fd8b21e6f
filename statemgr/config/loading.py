"""From a TOML file or a mapping to checked values: dotted key → value, references unresolved. Reads files."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from statemgr.config.entry import Key
from statemgr.config.keys import lookup, unknown
from statemgr.config.secrets import check_references, has_reference, is_secret
from statemgr.config.values import Value
from statemgr.errors import ConfigError


def read_toml(path: str | os.PathLike[str]) -> dict[str, object]:
    """The tables of a TOML file. Raises: ConfigError when it cannot be read or is no TOML."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration file {os.fspath(path)}",
            hint="`statemgr init` writes one, `--config` names another",
        ) from None
    except (OSError, ValueError) as error:  # no UTF-8, or NUL in its name
        raise ConfigError(f"{os.fspath(path)!r} cannot be read: {type(error).__name__}") from None
    try:
        return tomllib.loads(text)
    except (ValueError, OverflowError, RecursionError) as error:
        # Without the cause: its traceback would hold the document, and so the secrets in it. Only what TOML's own
        # errors say is known to repeat no value.
        reason = str(error) if isinstance(error, tomllib.TOMLDecodeError) else type(error).__name__
        raise ConfigError(f"{os.fspath(path)} is no valid TOML: {reason}", hint="texts need quotes") from None


def load_values(mapping: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, Value]:
    """Validated values of both mappings (nested or dotted); ``overrides`` win. Raises: ConfigError."""
    try:
        given = _canonical(mapping)
        given.update(_canonical(overrides))
    except RecursionError:
        raise ConfigError("the configuration is nested too deeply", hint="keys have a few levels") from None
    return {key: _parse(entry, key, value) for key, (entry, value) in sorted(given.items())}


def parse_resolved(key: str, value: str) -> Value:
    """What the references of one key's value stand for, checked. Raises: ConfigError, which never shows it."""
    return _checked(lookup(key), key, value, may_show=False)


def _canonical(mapping: Mapping[str, object]) -> dict[str, tuple[Key, object]]:
    """Flat keys with aliases replaced; a key that is given twice is refused."""
    result: dict[str, tuple[Key, object]] = {}
    for given, value in _flatten("", mapping):
        entry, key = lookup(given), given
        match = entry.regex.fullmatch(given)
        if entry.alias_of and match:
            key = entry.alias_of.replace("<name>", match["name"])
            entry = lookup(key)
            if isinstance(value, str):
                value = value.removeprefix("kafka.")
        if key in result:
            hint = "it may stand in a table, with dots, or under its alias"
            raise ConfigError(f"{key} is given twice", hint=hint, key=key)
        result[key] = (entry, value)
    return result


def _flatten(prefix: str, mapping: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in mapping.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if not isinstance(value, Mapping):
            yield key, value
        elif value:
            yield from _flatten(key, value)
        elif key.startswith("stores.") and key.count(".") == 1:
            # An empty table declares a store: leaving it out silently would lose the store.
            yield f"{key}.type", "rocksdb"


def _parse(entry: Key, key: str, value: object) -> Value:
    check_references(key, value)
    if has_reference(value):
        if not entry.deferred:
            raise ConfigError(
                f"{key} may not hold a reference",
                hint="${env:…} and ${file:…} are for kafka.*, blob.store.uri, blob.store.s3.*, state.dir "
                "and value.avro.schemas",
                key=key,
            )
        return str(value)
    if isinstance(value, Mapping):
        raise unknown(key)
    return _checked(entry, key, value, may_show=not is_secret(key))


def _checked(entry: Key, key: str, value: object, *, may_show: bool) -> Value:
    try:
        return entry.kind.parse(value)
    except (ValueError, OverflowError, RecursionError):
        shown = f", not {_short(value)}" if may_show else ""
        hint = None if may_show else "the value is not shown: it is a secret, or comes from a reference"
        raise ConfigError(f"{key} must be {entry.kind.expected}{shown}", key=key, hint=hint) from None


def _short(value: object) -> str:
    try:
        written = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested too deeply
        written = f"this {type(value).__name__}"
    # A URI may carry a password where none belongs.
    text = re.sub(r"//[^/\s]*@", "//…@", written)
    return text if len(text) <= 80 else text[:77] + "…"
