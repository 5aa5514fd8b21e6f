"""The pair of callables between an application's values and a store's bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Serde:
    """A pair of callables: value → bytes and bytes → value.

    Every checkpoint records ``name`` and ``version``, and a store that is opened with others is refused. Raise the
    version when the bytes of equal values change.
    """

    serialize: Callable[[Any], bytes]
    deserialize: Callable[[bytes], Any]
    name: str = "unnamed"
    version: int = 0

    @property
    def label(self) -> str:
        """What a checkpoint records: ``orders``, or ``orders v2``."""
        return f"{self.name} v{self.version}" if self.version else self.name
