"""Files that commands write for people."""

from __future__ import annotations

import os
from pathlib import Path

from statemgr.errors import InvalidError


def write_file(path: Path, text: str, *, force: bool, mode: int = 0o600) -> None:
    """Write a configuration file, or one that belongs to it.

    Only its owner may read it, unless ``mode`` says otherwise: people do put passwords here.
    Raises: InvalidError if it exists and ``force`` is not given.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        descriptor = os.open(path, flags, mode)
    except FileExistsError:
        raise InvalidError(f"{path} exists", hint="use --force to overwrite it") from None
    except FileNotFoundError:
        raise InvalidError(f"the directory of {path} does not exist", hint="create it first") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
