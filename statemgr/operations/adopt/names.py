"""Gives the stores of an old job names that a configuration can have. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from statemgr.config.contradictions import RESERVED_STORES
from statemgr.errors import InvalidError

#: A configuration key has the name of a store between two dots (``statemgr.config.keys``).
_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST = 128


def our_name(old: str) -> str:
    """The name here of a store of an old job: ``_`` for a character that a name cannot have, ``store`` before a name
    that cannot begin as it does, and at most 128 characters (``a.b`` → ``a_b``, ``-x`` → ``store-x``)."""
    name = _NOT_ALLOWED.sub("_", old)
    if name in RESERVED_STORES:
        name = f"_{name}"
    return (name if name[:1].isalnum() else f"store{name}")[:_LONGEST]


def named(found: Iterable[tuple[str, str]]) -> tuple[dict[str, str], dict[str, str]]:
    """Name the stores of an old job.

    Args:
        found: the old name of each store, and the topic of its changelog (or a word for where else it is).

    Returns: new name → topic, and new name → old name.

    Raises: InvalidError if two stores would have one name.
    """
    topics: dict[str, str] = {}
    old_names: dict[str, str] = {}
    for old, topic in found:
        name = our_name(old)
        if topics.setdefault(name, topic) != topic or old_names.setdefault(name, old) != old:
            raise InvalidError(
                f"the stores {old_names[name]!r} ({topics[name]}) and {old!r} ({topic}) would both be called {name!r}",
                hint=f"name every store to adopt: `statemgr adopt --changelog {name}={topics[name]} --changelog "
                f"STORE={topic}`, and the others in the same way",
                store=name,
            )
    return topics, old_names


def check_given(changelogs: Mapping[str, str]) -> None:
    """Check the names that a user has given: store → topic. Raises: InvalidError."""
    for name, topic in changelogs.items():
        if our_name(name) != name:
            raise InvalidError(
                f"a store cannot be called {name!r}: a name begins with a letter or a digit, and has at most "
                f"{_LONGEST} letters, digits, '_' and '-'",
                hint=f"choose another name: `statemgr adopt --changelog {our_name(name)}={topic}`",
            )
