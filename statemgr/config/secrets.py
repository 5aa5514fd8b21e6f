"""Secrets in the configuration: references to them, and masking. Reads the environment and files to resolve.

``${env:NAME}`` and ``${file:PATH}`` stay as they are in every object and are replaced where a client is made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from statemgr.errors import ConfigError

#: What is shown in place of a secret.
MASK = "********"
_SHORT = 4

_REFERENCE = re.compile(r"\$\{(env|file):([^{}]+)\}")
_LOOKS_LIKE_ONE = re.compile(r"\$\{[A-Za-z_]*:[^{}]*\}")
_SECRET_KEY = re.compile(
    r"password|passwd|passphrase|secret|token|credential|jaas|oauth|\bsasl\.(?!mechanisms?$)|\.pem$|access\.key",
    re.IGNORECASE,
)


def has_reference(value: object) -> bool:
    """True when ``value`` is a text with a ``${env:…}`` or ``${file:…}`` in it."""
    return isinstance(value, str) and bool(_REFERENCE.search(value))


def check_references(key: str, value: object) -> None:
    """Refuse what looks like a reference and is none. Raises: ConfigError."""
    if isinstance(value, str) and _LOOKS_LIKE_ONE.search(_REFERENCE.sub("", value)):
        raise ConfigError(
            f"{key} holds a reference of an unknown kind",
            hint="write ${env:NAME} or ${file:PATH}",
            key=key,
        )


def resolve(key: str, text: str) -> str:
    """``text`` with its references replaced by what they name; a file's last line end is left out.

    Raises: ConfigError when a variable is not set or a file cannot be read; it names the reference, no value.
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
    """What is never to be shown: whatever a reference stands for, and the values of secret keys.

    Texts of fewer than four letters are left out: taking them out of a message would leave no message.
    """
    found: set[str] = set()
    for key, value in values.items():
        for reference in _REFERENCE.finditer(value) if isinstance(value, str) else ():
            with suppress(ConfigError):  # it stands for nothing
                found.add(resolve(key, reference[0]))
        if is_secret(key) and not has_reference(value):
            found.add(str(value))
    return frozenset(part for text in found for part in (text, text.strip(), repr(text)[1:-1]) if len(part) >= _SHORT)


def without(texts: Collection[str], message: str) -> str:
    """A message with a mask in place of each of the texts."""
    for text in sorted(texts, key=len, reverse=True):
        message = message.replace(text, MASK)
    return message


def is_secret(key: str) -> bool:
    """True for keys whose values are secret by their name."""
    return bool(_SECRET_KEY.search(key))


def masked(key: str, value: object) -> object:
    """What may be shown of a key's value: a mask for secret keys, unless it is nothing but a reference."""
    if not is_secret(key):
        return value
    if isinstance(value, str) and _REFERENCE.fullmatch(value):
        return value
    return MASK
