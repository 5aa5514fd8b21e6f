"""The port of threads. No I/O here."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Protocol


class Executors(Protocol):
    """Makes what runs work next to its caller. A simulation of whole histories puts its own scheduler here."""

    def pool(self, name: str, threads: int) -> Executor:
        """Up to ``threads`` calls at a time. Who asked for it shuts it down."""

    def worker(self, name: str, *, background: bool) -> Executor:
        """One call at a time, as long as its user does not ask for more. ``background``: a process that ends does not
        wait for it."""

    def close(self) -> None:
        """Wait for the calls of workers that still run."""
