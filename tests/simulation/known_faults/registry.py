"""The faults that can be put back: each is a function that makes its patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

Patches = list[Any]
#: Name → what makes the patches.
KNOWN: dict[str, Callable[[], Patches]] = {}


def known(make: Callable[[], Patches]) -> Callable[[], Patches]:
    """A known fault."""
    KNOWN[make.__name__] = make
    return make


def patch(target: object, name: str, value: object) -> Any:
    """In place of an attribute."""
    return mock.patch.object(target, name, value)


def imported(target: object, name: str) -> Any:
    """What a module has imported."""
    return getattr(target, name)


@contextmanager
def put_back(name: str | None) -> Iterator[None]:
    """In this block the product has the fault of this name."""
    with ExitStack() as stack:
        for one in KNOWN[name]() if name is not None else ():
            stack.enter_context(one)
        yield
