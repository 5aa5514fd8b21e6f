"""Looking keys up in the table. Pure."""

from __future__ import annotations

import difflib

from statemgr.config.entry import Key
from statemgr.config.table import KEYS
from statemgr.errors import ConfigError

#: Letters of an unknown key that are shown, and compared with known ones.
_LONGEST = 200


def find(key: str) -> Key | None:
    """The entry for a key, or None when it is unknown."""
    return next((entry for entry in KEYS if entry.regex.fullmatch(key)), None)


def lookup(key: str) -> Key:
    """The entry for a key. Raises: ConfigError naming the nearest known key."""
    entry = find(key)
    if entry is None:
        raise unknown(key)
    return entry


def unknown(key: str) -> ConfigError:
    """The error for an unknown key, with the nearest known one as its hint."""
    parts = key.split(".")
    name = parts[1] if len(parts) > 1 else "<name>"
    candidates = [entry.pattern.replace("<name>", name) for entry in KEYS]
    near = difflib.get_close_matches(key[:_LONGEST], candidates, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "`statemgr config show --all` lists every key"
    shown = key if len(key) <= _LONGEST and key.isprintable() else repr(key[:_LONGEST])
    return ConfigError(f"unknown configuration key {shown}", hint=hint, key=shown)
