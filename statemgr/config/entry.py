"""What the table of configuration keys is made of. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from statemgr.config.values import Kind, Value

#: A store's name in a key has no dots, so that a mistyped key is never taken for another store.
STORE_NAME = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key, or a family of them.

    ``default`` None with a ``default_text`` is worked out from other keys. ``deferred``: the value may hold
    references, and is checked again when they are resolved. ``alias_of`` is the pattern that it stands for.
    """

    pattern: str
    kind: Kind
    doc: str
    default: Value | None = None
    default_text: str | None = None
    deferred: bool = False
    alias_of: str | None = None
    regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = re.escape(self.pattern).replace("<name>", f"(?P<name>{STORE_NAME})")
        if self.pattern.endswith("*"):
            text = text.removesuffix(r"\*") + r"(?P<rest>[A-Za-z0-9_][A-Za-z0-9_.-]*)"
        object.__setattr__(self, "regex", re.compile(text))
