"""The pair of callables between an application's values and a store's bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from statemgr.errors import ConfigError

PAIR = "pass the two functions (value → bytes, bytes → value), or a Serde of them"

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
    K = TypeVar("K", default=Any)
    V = TypeVar("V", default=Any)
else:
    # defaults of type variables are for type checkers; Python itself has them since 3.13
    from typing import TypeVar

    T, K, V = TypeVar("T"), TypeVar("K"), TypeVar("V")


@dataclass(frozen=True, slots=True)
class Serde(Generic[T]):
    """A pair of callables: value → bytes and bytes → value.

    Every checkpoint records ``name`` and ``version``, and a store that is opened with others is refused. Raise the
    version when the bytes of equal values change.

    Raises: ConfigError for what is no pair of callables.
    """

    serialize: Callable[[T], bytes]
    deserialize: Callable[[bytes], T]
    name: str = "unnamed"
    version: int = 0

    def __post_init__(self) -> None:
        if not (callable(self.serialize) and callable(self.deserialize)):
            raise ConfigError("a serde is a pair of callables", hint=PAIR)

    @property
    def label(self) -> str:
        """What a checkpoint records: ``orders``, or ``orders v2``."""
        return f"{self.name} v{self.version}" if self.version else self.name
