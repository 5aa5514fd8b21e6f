"""Faults that the project once had, or that others have, and that the simulation must find when they are put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

#: Name → what makes the fault.
KNOWN: dict[str, Callable[[], list[mock._patch]]] = {}  # type: ignore[type-arg]


@contextmanager
def put_back(name: str | None) -> Iterator[None]:
    """In this block the product has the fault of this name."""
    with ExitStack() as stack:
        for patch in KNOWN[name]() if name is not None else ():
            stack.enter_context(patch)
        yield
