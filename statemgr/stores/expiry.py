"""Stores with a time to live: what a task writes expires, and what has expired is deleted like any other entry.

A task's store stamps each value that is put, and hides what has expired. There is no index of expiries: a walk over the
keys finds what has expired, a bounded number of keys at a time. Its deletes are ordinary changes, so they reach
changelogs and segments, and everything below (backends, rescale, verify) knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing

from statemgr.errors import CorruptError, CorruptFile, MissingFile
from statemgr.model.checkpoint import Checkpoint
from statemgr.model.commit import Change
from statemgr.model.expiry import expiry_bytes, live
from statemgr.ports import Clock, Items, ReadableStore, StoreIdentity
from statemgr.stores.write_buffer import WriteBuffer

#: Seconds between two steps of a walk, and the keys and bytes after which a step ends.
STEP_S, STEP_KEYS, STEP_BYTES = 1.0, 10_000, 16 * 1024 * 1024
#: A walk begins when this part of the TTL has passed since the last one began.
_WALKS_PER_TTL = 10
_MS_PER_S, _NS_PER_MS = 1000, 1_000_000


class LiveView:
    """A store with a TTL without its expired entries, for reading.

    Args:
        store: the stored bytes.
        now_ms: the time for which it shows the store, in epoch milliseconds.

    Every method raises CorruptError if a value has no expiry.
    """

    def __init__(self, identity: StoreIdentity, store: ReadableStore, now_ms: Callable[[], int]) -> None:
        self._where = {"task": identity.task, "store": identity.store}
        self._store = store
        self._now_ms = now_ms

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None."""
        return self._live(self._store.get(key), expiry_bytes(self._now_ms()))

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values, in the order of the keys."""
        now = expiry_bytes(self._now_ms())
        return [self._live(stored, now) for stored in self._store.get_many(keys)]

    def scan(self, start: bytes | None, end: bytes | None) -> Items:
        """Items with ``start`` ≤ key < ``end`` in key order, as of the call."""
        return _LiveItems(self._store.scan(start, end), self._live, expiry_bytes(self._now_ms()))

    def _live(self, stored: bytes | None, now: bytes) -> bytes | None:
        try:
            return live(stored, now)
        except CorruptError as error:
            raise error.with_where(**self._where) from None


class _LiveItems(Iterator[tuple[bytes, bytes]]):
    """Like the scan below it, it goes on after a step that failed. A generator would end there."""

    def __init__(self, items: Items, live_at: Callable[[bytes, bytes], bytes | None], now: bytes) -> None:
        self._items = items
        self._live_at = live_at
        self._now = now

    def __next__(self) -> tuple[bytes, bytes]:
        for key, stored in self._items:
            value = self._live_at(stored, self._now)
            if value is not None:
                return key, value
        raise StopIteration

    def close(self) -> None:
        self._items.close()


def as_published(store: ReadableStore, checkpoint: Checkpoint, identity: StoreIdentity) -> ReadableStore:
    """A store of a checkpoint without the entries that had expired at the time of the checkpoint."""
    if not checkpoint.has_ttl(identity.store):
        return store
    return LiveView(identity, store, lambda: checkpoint.checkpoint_id.millis)


def live_items(
    items: list[tuple[bytes, bytes]], checkpoint: Checkpoint, identity: StoreIdentity
) -> list[tuple[bytes, bytes]]:
    """As :func:`as_published`, for items that were read."""
    if not checkpoint.has_ttl(identity.store):
        return items
    now = expiry_bytes(checkpoint.checkpoint_id.millis)
    try:
        return [(key, value) for key, stored in items if (value := live(stored, now)) is not None]
    except CorruptError as error:
        raise error.with_where(task=identity.task, store=identity.store) from None


class ExpiringEntries(LiveView):
    """The entries of a task's store with a TTL. Offers what the write buffer does, for values without their expiry."""

    def __init__(self, identity: StoreIdentity, buffer: WriteBuffer, clock: Clock, ttl_ms: int) -> None:
        super().__init__(identity, buffer, lambda: clock.time_ns() // _NS_PER_MS)
        self.give_up = buffer.give_up
        self.delete_range = buffer.delete_range
        self.statistics = buffer.statistics
        self._buffer = buffer
        self._clock = clock
        self._ttl_ms = ttl_ms
        #: Where the walk goes on; None between two walks.
        self._next_key: bytes | None = None
        self._next_walk_s = clock.monotonic()

    def put(self, key: bytes, value: bytes | None) -> None:
        """Set or, with None, delete one key. Raises: as :meth:`WriteBuffer.put`."""
        self._buffer.put(key, self._expiry() + value if isinstance(value, bytes) else value)

    def write(self, changes: Iterable[Change]) -> None:
        """Apply changes in order, all or none of them. Raises: as :meth:`WriteBuffer.put`."""
        expiry = self._expiry()
        self._buffer.write([(k, expiry + v if isinstance(v, bytes) else v) for k, v in changes])

    def delete_expired(self) -> int:
        """Take the next step of a walk over the keys, if one is due: delete those that have expired.

        A step looks at up to ``STEP_KEYS`` keys or ``STEP_BYTES``. It reads and deletes on the caller's thread.

        Returns: the keys that it deleted. Raises: DiskFull, ClosedError, LocalStateLost, CorruptError.
        """
        if self._next_key is None:
            now_s = self._clock.monotonic()
            if now_s < self._next_walk_s:
                return 0
            self._next_walk_s = now_s + self._ttl_ms / _MS_PER_S / _WALKS_PER_TTL
        now, expired = expiry_bytes(self._now_ms()), list[Change]()
        with closing(self._buffer.scan(self._next_key, None)) as items:
            try:
                self._next_key = self._look(items, now, expired)
            except (CorruptFile, MissingFile) as error:
                raise self.give_up(error) from error
        self._buffer.write(expired)
        return len(expired)

    def _look(self, items: Items, now: bytes, expired: list[Change]) -> bytes | None:
        """Add deletes to ``expired``. Returns: where the next step goes on, None if this was the last one."""
        size = 0
        for number, (key, stored) in enumerate(items, 1):
            if self._live(stored, now) is None:
                expired.append((key, None))
            size += len(stored)
            if number >= STEP_KEYS or size >= STEP_BYTES:
                return key + b"\0"
        return None

    def _expiry(self) -> bytes:
        return expiry_bytes(self._now_ms() + self._ttl_ms)
