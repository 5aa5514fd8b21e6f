"""Loads a TOML file or a mapping as checked values: dotted key → value, with references unresolved. Reads files.

Loading replaces Samza's names for keys and classes that statemgr has too, and tells the user. A name of Samza's that
means something else here is an unknown key.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.config.keys import Key, lookup
from statemgr.config.secrets import check_references, has_reference, is_secret
from statemgr.config.values import Value
from statemgr.errors import ConfigError

#: Samza's key → ours.
SAMZA_KEYS: Final = {
    "task.commit.manager": "task.backup.factories",
    "task.restore.manager": "task.restore.factories",
    "stores.backup.factories": "task.backup.factories",
    "stores.restore.factories": "task.restore.factories",
    "stores.<name>.changelog": "stores.<name>.changelog.topic",
    "stores.<name>.factory": "stores.<name>.type",
}
#: Samza's class → our name.
SAMZA_CLASSES: Final = {
    "org.apache.samza.storage.KafkaChangelogStateBackendFactory": KAFKA_CHANGELOG,
    "org.apache.samza.storage.blobstore.BlobStoreStateBackendFactory": BLOB_STORE,
    "org.apache.samza.storage.kv.RocksDbKeyValueStorageEngineFactory": "rocksdb",
    "org.apache.samza.storage.kv.inmemory.InMemoryKeyValueStorageEngineFactory": "memory",
}


def read_toml(path: str | os.PathLike[str]) -> dict[str, object]:
    """The tables of a TOML file. Raises: ConfigError if it cannot be read or is not TOML."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors put a mark at the beginning
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration file {os.fspath(path)}",
            hint="create one with `statemgr init`, or name another with `--config`",
        ) from None
    except (OSError, ValueError) as error:  # not UTF-8, or NUL in its name
        raise ConfigError(f"{os.fspath(path)!r} cannot be read: {type(error).__name__}") from None
    try:
        return tomllib.loads(text)
    except (ValueError, OverflowError, RecursionError) as error:
        # without the cause, because its traceback has the document, with its secrets; only TOML's own errors are known
        # to show no value
        reason = str(error) if isinstance(error, tomllib.TOMLDecodeError) else type(error).__name__
        raise ConfigError(f"{os.fspath(path)} is not valid TOML: {reason}", hint="put texts in quotes") from None


def load_values(*mappings: Mapping[str, object]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """The checked values of mappings with nested or dotted keys, and notices for the user. Later mappings win.

    Raises: ConfigError.
    """
    given: dict[str, object] = {}
    notices: dict[str, None] = {}
    try:
        for mapping in mappings:
            found: dict[str, object] = {}
            for written, value in _flatten("", mapping):
                key, ours, replaced = translated(written, value)
                lookup(key)
                if key in found:
                    hint = "it is in a table and in dotted form, or under Samza's name too: remove one"
                    raise ConfigError(f"{key} is given twice", hint=hint, key=key)
                found[key] = ours
                notices.update(dict.fromkeys(replaced))
            given.update(found)
    except RecursionError:
        raise ConfigError("the configuration is nested too deeply", hint="keys have at most a few levels") from None
    return {key: _parse(key, value) for key, value in sorted(given.items())}, tuple(notices)


def parse_resolved(key: str, value: str) -> Value:
    """Check the value of a key after its references were resolved. Raises: ConfigError, which never shows the value."""
    return _checked(lookup(key), key, value, may_show=False)


def _flatten(prefix: str, mapping: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in mapping.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if not isinstance(value, Mapping):
            yield key, value
        elif value:
            yield from _flatten(key, value)
        elif key.startswith("stores.") and key.count(".") == 1:
            # an empty table declares a store, which must not be lost silently
            yield f"{key}.type", "rocksdb"


def _parse(key: str, value: object) -> Value:
    check_references(key, value)
    entry = lookup(key)
    if has_reference(value):
        if not entry.kind.deferred:
            raise ConfigError(
                f"{key} may not hold a reference",
                hint="${env:…} and ${file:…} are for kafka.*, schema.registry.*, blob.store.uri, blob.store.s3.*, "
                "blob.store.gcs.*, blob.store.azure.*, "
                "state.dir and value.avro.schemas",
                key=key,
            )
        return str(value)
    return _checked(entry, key, value, may_show=not is_secret(key))


def _checked(entry: Key, key: str, value: object, *, may_show: bool) -> Value:
    try:
        return entry.kind.parse(value)
    except (ValueError, OverflowError, RecursionError):
        shown = f", not {_short(value)}" if may_show else ""
        hint = None if may_show else "the value is hidden: it is a secret, or comes from a reference"
        raise ConfigError(f"{key} must be {entry.kind.expected}{shown}", key=key, hint=hint) from None


def _short(value: object) -> str:
    try:
        written = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested too deeply
        written = f"this {type(value).__name__}"
    # a URI may have a password where none belongs
    text = re.sub(r"//[^/\s]*@", "//…@", written)
    return text if len(text) <= 80 else text[:77] + "…"


def our_key(key: str) -> str:
    """Our name for a key of Samza's; any other key as it is."""
    first, _, rest = key.partition(".")
    name, _, setting = rest.partition(".")
    if key in SAMZA_KEYS or first != "stores":
        return SAMZA_KEYS.get(key, key)
    pattern = SAMZA_KEYS.get(f"stores.<name>.{setting}")
    return pattern.replace("<name>", name) if pattern else key


def translated(given: str, value: object) -> tuple[str, object, list[str]]:
    """A key and its value with our names instead of Samza's, and a sentence for each name that was replaced."""
    key, replaced = our_key(given), {}
    if key != given:
        replaced[given] = key
    if key != given and key.endswith(".changelog.topic") and isinstance(value, str):
        value = value.removeprefix("kafka.")  # <system>.<stream>
    if key.endswith((".factories", ".type")):
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else []
        names = {name: name.strip() for name in items if isinstance(name, str)}
        classes = {name: SAMZA_CLASSES[text] for name, text in names.items() if text in SAMZA_CLASSES}
        if classes:
            ours = [classes.get(item, item) for item in items]
            value = ",".join(ours) if isinstance(value, str) else ours
            replaced |= {name.strip(): our for name, our in classes.items()}
    return key, value, [f"{name} is Samza's name for {ours}; statemgr uses {ours}" for name, ours in replaced.items()]
