"""Loads a TOML file or a mapping as checked values (dotted key → value). Resolves and masks secrets. Reads the
environment and files.

Loading replaces Samza's names for keys and classes that statemgr has too, and tells the user. A name of Samza's that
means something else here is an unknown key. References to secrets (``${env:NAME}``, ``${file:PATH}``) stay unresolved
in every object until a client is made.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.config.keys import Key, lookup
from statemgr.config.values import AVRO_SCHEMAS, Value
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
#: Shown in place of a secret.
MASK = "********"
_SHORT = 4
_REFERENCE = re.compile(r"\$\{(env|file):([^{}]+)\}")
_LOOKS_LIKE_ONE = re.compile(r"\$\{[A-Za-z_]*:[^{}]*\}")
_SECRET_KEY = re.compile(
    r"password|passwd|passphrase|secret|token|credential|jaas|oauth|\bsasl\.(?!mechanisms?$)|\.pem$|access\.key|user\.info|connection\.string",
    re.IGNORECASE,
)
#: The user and the password in a URL. The paths of blobs may have an @, and in `abfss`, a container is before the @.
_BEFORE_USER = r"https?://|(?<!abfss)://(?=[^/]*[:@])"
_USER_INFO = re.compile(rf"({_BEFORE_USER})(.+)@", re.DOTALL)
#: The same in the value of an address, which may have no scheme.
_USER_INFO_OF_ADDRESS = re.compile(rf"({_BEFORE_USER}|^(?=[^/@]*:[^/]))(.+)@", re.DOTALL)
_ADDRESS_KEY = re.compile(r"(url|uri|proxy|endpoint|servers)$")


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
    entry = lookup(key)
    # a schema in a list is never resolved, and its ``doc`` may have any text
    for item in value if isinstance(value, list | tuple) and entry.kind is not AVRO_SCHEMAS else [value]:
        check_references(key, item)
        if has_reference(item) and not entry.kind.deferred:
            raise ConfigError(
                f"{key} may not hold a reference",
                hint="${env:…} and ${file:…} are for kafka.*, schema.registry.*, blob.store.uri, blob.store.s3.*, "
                "blob.store.gcs.*, blob.store.azure.*, "
                "state.dir and value.avro.schemas",
                key=key,
            )
    if has_reference(value):
        return str(value)
    return _checked(entry, key, value, may_show=not is_secret(key))


def _checked(entry: Key, key: str, value: object, *, may_show: bool) -> Value:
    try:
        return entry.kind.parse(value)
    except (ValueError, OverflowError, RecursionError):
        shown = f", not {_short(key, value)}" if may_show else ""
        hint = None if may_show else "the value is hidden: it is a secret, or comes from a reference"
        raise ConfigError(f"{key} must be {entry.kind.expected}{shown}", key=key, hint=hint) from None


def _short(key: str, value: object) -> str:
    try:
        written = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested too deeply
        written = f"this {type(value).__name__}"
    text = without_user(key, written)  # a URI may have a password where none belongs
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


def has_reference(value: object) -> bool:
    """Whether ``value`` is a text with a ``${env:…}`` or ``${file:…}`` in it."""
    return isinstance(value, str) and bool(_REFERENCE.search(value))


def check_references(key: str, value: object) -> None:
    """Raises: ConfigError if the value looks like a reference and is none."""
    if isinstance(value, str) and _LOOKS_LIKE_ONE.search(_REFERENCE.sub("", value)):
        raise ConfigError(
            f"{key} holds a reference of an unknown kind",
            hint="write ${env:NAME} or ${file:PATH}",
            key=key,
        )


def resolve(key: str, text: str) -> str:
    """``text`` with its references replaced by their values. The last line end of a file is left out.

    Raises: ConfigError if a variable is not set or a file cannot be read. It names the reference and no value.
    """

    def replace(match: re.Match[str]) -> str:
        kind, name = match[1], match[2]
        if kind == "env":
            if "\0" in name or name not in os.environ:
                raise ConfigError(
                    f"{key} refers to the environment variable {name}, which is not set",
                    hint=f"export {name} on every machine of the job",
                    key=key,
                )
            return os.environ[name]
        try:
            return Path(name).read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
        except (OSError, ValueError) as error:  # no UTF-8, or NUL in its name
            raise ConfigError(
                f"{key} refers to the file {name}, which cannot be read ({type(error).__name__})",
                hint="make it readable on every machine of the job",
                key=key,
            ) from None

    return _REFERENCE.sub(replace, text)


def hidden_texts(values: Mapping[str, object]) -> frozenset[str]:
    """The texts that must never be shown: the values of references and of secret keys.

    Texts of fewer than four letters are left out, because masking them would make messages unreadable.
    """
    found: set[str] = set()
    urls = [(key, value) for key, value in values.items() if isinstance(value, str)]
    for key, value in values.items():
        for reference in _REFERENCE.finditer(value) if isinstance(value, str) else ():
            with suppress(ConfigError):  # it cannot be resolved
                urls.append((key, resolve(key, reference[0])))
                found.add(urls[-1][1])
        if is_secret(key) and not has_reference(value):
            found.add(str(value))
    for user in filter(None, (_user_info(key).search(url) for key, url in urls)):
        found |= {user[2], user[2].partition(":")[2]}
    return frozenset(part for text in found for part in (text, text.strip(), repr(text)[1:-1]) if len(part) >= _SHORT)


def without(texts: Collection[str], message: str) -> str:
    """The message with each of the texts masked."""
    for text in sorted(texts, key=len, reverse=True):
        message = message.replace(text, MASK)
    return message


@lru_cache(1024)
def is_secret(key: str) -> bool:
    """Whether the name of a key says that its value is secret."""
    return bool(_SECRET_KEY.search(key))


def without_user(key: str, url: str) -> str:
    """The value of a key with the user and the password of a URL masked."""
    return _user_info(key).sub(rf"\g<1>{MASK}@", url)


def masked(key: str, value: object) -> object:
    """The value of a key to show: a mask for a secret key, unless the whole value is a reference, and for the user and
    the password in a URL."""
    if not is_secret(key):
        return without_user(key, value) if isinstance(value, str) else value
    if isinstance(value, str) and _REFERENCE.fullmatch(value):
        return value
    return MASK


def _user_info(key: str) -> re.Pattern[str]:
    return _USER_INFO_OF_ADDRESS if _ADDRESS_KEY.search(key) else _USER_INFO
