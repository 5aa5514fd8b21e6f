"""Blob stores and a clock that tests control, for testing the decorators and engines above a blob store."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from statemgr.blobs.memory import MemoryBlobStore
from statemgr.errors import UnavailableError
from statemgr.ports import BlobPage, BlobReader, Body


def watch_sends(patch: pytest.MonkeyPatch) -> list[tuple[int, float | None]]:
    """The size and the time-out (seconds) of each larger text that a socket sends from now on."""
    send, sent = socket.socket.sendall, list[tuple[int, float | None]]()

    def sendall(self: socket.socket, data: Any, *more: Any) -> None:
        if len(data) > 10_000:
            sent.append((len(data), self.gettimeout()))
        send(self, data, *more)

    patch.setattr(socket.socket, "sendall", sendall, raising=False)
    return sent


class ManualClock:
    """A clock that only moves when a caller sleeps or a test moves it. ``sleeps`` lists the seconds of each sleep."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.sleeps: list[float] = []

    def time_ns(self) -> int:
        """Return the nanoseconds since the epoch."""
        return int(self.now * 1_000_000_000)

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return self.now

    def elapsed(self) -> float:
        """Return the time in seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move the clock forward by ``seconds``."""
        self.sleeps.append(seconds)
        self.now += seconds

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        """Wait for the condition without moving the clock."""
        return changed.wait(0.01)

    def give_up(self) -> None:
        """Move the clock past every deadline."""
        self.now += 1e9


class FaultyBlobStore(MemoryBlobStore):
    """Blobs in memory, with faults that a test sets for each method.

    ``faults[method]`` lists what the next calls of that method do first: raise an exception, or call a function with
    the blob's name. None lets the call through. ``calls`` holds (method, blob) in order. ``breaks`` lists, for the next
    GETs, the number of bytes after which each one breaks off. ``altered`` maps a blob to a function that changes the
    bytes that a GET returns.
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        super().__init__(clock or ManualClock())
        self.faults: dict[str, list[Exception | Callable[[str], object] | None]] = {}
        self.calls: list[tuple[str, str]] = []
        self.breaks: list[int | None] = []
        self.altered: dict[str, Callable[[bytes], bytes]] = {}
        self.ranges: list[tuple[int, int | None]] = []
        self._faults_lock = threading.Lock()

    def _fault(self, method: str, blob_id: str) -> None:
        with self._faults_lock:
            self.calls.append((method, blob_id))
            faults = self.faults.get(method)
            fault = faults.pop(0) if faults else None
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            fault(blob_id)

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        """Write the blob, then fault: a PUT that returned an error may still have written it."""
        super().put(blob_id, body, ttl_days=ttl_days)
        self._fault("put", blob_id)

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        """Fault, then read the blob."""
        self._fault("get", blob_id)
        with self._faults_lock:
            breaks_after = self.breaks.pop(0) if self.breaks else None
            self.ranges.append((offset, length))
        with super().get(blob_id, offset, length) as reader:
            yield _Reader(reader, breaks_after, self.altered.get(blob_id))

    def delete(self, blob_id: str) -> None:
        """Fault, then delete the blob."""
        self._fault("delete", blob_id)
        super().delete(blob_id)

    def remove_ttl(self, blob_id: str) -> None:
        """Fault, then remove the time to live."""
        self._fault("remove_ttl", blob_id)
        super().remove_ttl(blob_id)

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        """Fault, then return the page."""
        self._fault("list", token or "")
        return super().list(prefix, token)

    def count(self, method: str) -> int:
        """Return how often a method was called."""
        return sum(called == method for called, _ in self.calls)


class _Reader:
    def __init__(self, inner: BlobReader, breaks_after: int | None, alter: Callable[[bytes], bytes] | None) -> None:
        self._inner = inner
        self._left = breaks_after
        self._alter = alter
        self._altered: bytes | None = None

    def copy_to(self, fd: int, offset: int, size: int) -> int | None:
        """Refuse the direct copy, so that callers use ``readinto``."""
        return None

    def readinto(self, buffer: memoryview) -> int:
        """Read, and break off at the byte that the test chose."""
        if self._alter is not None:
            return self._read_altered(buffer)
        if self._left is None:
            return self._inner.readinto(buffer)
        if self._left == 0:
            raise UnavailableError("broke off")
        size = self._inner.readinto(buffer[: self._left])
        self._left -= size
        return size

    def _read_altered(self, buffer: memoryview) -> int:
        if self._altered is None:
            assert self._alter is not None
            whole = bytearray()
            piece = memoryview(bytearray(65536))
            while size := self._inner.readinto(piece):
                whole += piece[:size]
            self._altered = self._alter(bytes(whole))
        size = min(len(buffer), len(self._altered))
        buffer[:size] = self._altered[:size]
        self._altered = self._altered[size:]
        return size


def read(store: FaultyBlobStore, blob_id: str, step: int = 4096) -> bytes:
    """Return a blob's bytes."""
    found = bytearray()
    buffer = memoryview(bytearray(step))
    with store.get(blob_id) as reader:
        while size := reader.readinto(buffer):
            found += buffer[:size]
    return bytes(found)
