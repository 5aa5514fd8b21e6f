"""Resolves references to secrets, and masks secrets. Reads the environment and files.

References (``${env:NAME}``, ``${file:PATH}``) stay unresolved in every object until a client is made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from statemgr.errors import ConfigError

#: Shown in place of a secret.
MASK = "********"
_SHORT = 4

_REFERENCE = re.compile(r"\$\{(env|file):([^{}]+)\}")
_LOOKS_LIKE_ONE = re.compile(r"\$\{[A-Za-z_]*:[^{}]*\}")
_SECRET_KEY = re.compile(
    r"password|passwd|passphrase|secret|token|credential|jaas|oauth|\bsasl\.(?!mechanisms?$)|\.pem$|access\.key|user\.info|connection\.string",
    re.IGNORECASE,
)


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
    for key, value in values.items():
        for reference in _REFERENCE.finditer(value) if isinstance(value, str) else ():
            with suppress(ConfigError):  # it cannot be resolved
                found.add(resolve(key, reference[0]))
        if is_secret(key) and not has_reference(value):
            found.add(str(value))
    return frozenset(part for text in found for part in (text, text.strip(), repr(text)[1:-1]) if len(part) >= _SHORT)


def without(texts: Collection[str], message: str) -> str:
    """The message with each of the texts masked."""
    for text in sorted(texts, key=len, reverse=True):
        message = message.replace(text, MASK)
    return message


def is_secret(key: str) -> bool:
    """Whether the name of a key says that its value is secret."""
    return bool(_SECRET_KEY.search(key))


def masked(key: str, value: object) -> object:
    """The value of a key to show: a mask for a secret key, unless the whole value is a reference."""
    if not is_secret(key):
        return value
    if isinstance(value, str) and _REFERENCE.fullmatch(value):
        return value
    return MASK
