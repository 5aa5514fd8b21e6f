"""What a serde is: a pair of callables between an application's values and a store's bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Serde:
    """A pair of callables: value → bytes and bytes → value."""

    serialize: Callable[[Any], bytes]
    deserialize: Callable[[bytes], Any]
