"""Secrets in the configuration: references to them, and masking. Reads the environment and files to resolve.

``${env:NAME}`` and ``${file:PATH}`` stay as they are in every object and are replaced where a client is made.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from statemgr.errors import ConfigError

#: What is shown in place of a secret.
MASK = "********"

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
            hint="references are ${env:NAME} and ${file:PATH}",
            key=key,
        )


def resolve(key: str, text: str) -> str:
    """``text`` with its references replaced by what they name; a file's last line end is left out.

    Raises: ConfigError when a variable is not set or a file cannot be read; it names the reference, no value.
    """

    def replace(match: re.Match[str]) -> str:
        kind, name = match[1], match[2]
        if kind == "env":
            if name not in os.environ:
                raise ConfigError(
                    f"{key} refers to the environment variable {name}, which is not set",
                    hint=f"export {name}, also for the workers of a cluster",
                    key=key,
                )
            return os.environ[name]
        try:
            return Path(name).read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{key} refers to the file {name}, which cannot be read ({type(error).__name__})",
                hint="the file must exist and be readable on every machine of the job",
                key=key,
            ) from None

    return _REFERENCE.sub(replace, text)


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
