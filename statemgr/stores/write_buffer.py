"""The write buffer of an open store: gathers changes in memory, writes them in batches, and keeps them for the
changelog.

Reads see gathered changes at once. Each batch goes to the local store first and to the change buffer right after it, so
that both have the same changes whatever fails. If a signal raises an exception in between, the batch stays gathered and
is written to both again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice

from statemgr.errors import ClosedError, CorruptFile, InvalidError, LocalStateLost, MissingFile, StatemgrError
from statemgr.local.change_buffer import ChangeBuffer
from statemgr.model.commit import Change, are_all, size_of
from statemgr.model.record_size import too_large
from statemgr.ports import Items, LocalStore, StoreIdentity

#: Most bytes of keys and values that are gathered.
BATCH_BYTES = 4 * 1024 * 1024
#: Keys of a deleted range that are in memory at a time.
_RANGE_BATCH = 1000
_ABSENT = object()


class WriteBuffer:
    """A local store behind a write buffer. Used from one thread.

    Args:
        identity: for errors.
        give_up: turns an error about damaged or missing local files into the error to raise.
        changes: keeps changes for the changelog; None if no backend needs them.
        batch_size: number of gathered changes at which they are written.
    """

    def __init__(
        self,
        identity: StoreIdentity,
        local: LocalStore,
        changes: ChangeBuffer | None,
        batch_size: int,
        give_up: Callable[[CorruptFile | MissingFile], LocalStateLost],
    ) -> None:
        self.give_up = give_up
        self._most_bytes, self._smaller = sys.maxsize, ""
        self._where = {"task": identity.task, "store": identity.store}
        self._local = local
        self._changes = changes
        self._batch_size = batch_size
        self._pending: dict[bytes, bytes | None] = {}
        #: Upper bound of the pending bytes: a change that replaces another one counts in addition.
        self._pending_bytes = 0
        self._closed = False
        #: Keys that were looked up, and keys in the batches that were written.
        self._keys_read = 0
        self._keys_written = 0
        self._much = 0
        self._on_much: Callable[[], None] | None = None

    def watch(self, size: int, call: Callable[[], None]) -> None:
        """After a batch, call ``call`` if about ``size`` bytes of changes were added since the last freeze."""
        self._much, self._on_much = size, call

    def limit(self, most_bytes: int, hint: str) -> None:
        """From now on refuse a key and value that have more bytes together, with this hint."""
        self._most_bytes, self._smaller = most_bytes, hint

    def track(self, changes: ChangeBuffer) -> None:
        """From now on keep changes there."""
        self._changes = changes

    @property
    def pending(self) -> int:
        """Number of changes that the local store does not have yet."""
        return len(self._pending)

    def get(self, key: bytes) -> bytes | None:
        """The newest value of a key, or None. Raises: InvalidError (not bytes)."""
        if not isinstance(key, bytes):
            raise self._not_bytes([key])
        self._keys_read += 1
        if self._pending:
            found = self._pending.get(key, _ABSENT)
            if found is not _ABSENT:
                return found  # type: ignore[return-value]
        try:
            return self._local.get(key)
        except (CorruptFile, MissingFile) as error:
            raise self.give_up(error) from error

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The newest values, in the order of the keys."""
        if not are_all(bytes, keys):
            raise self._not_bytes(keys)
        self._keys_read += len(keys)
        pending = self._pending
        missing = [key for key in keys if key not in pending] if pending else keys
        try:
            stored = iter(self._local.get_many(missing))
        except (CorruptFile, MissingFile) as error:
            raise self.give_up(error) from error
        return [pending[key] if key in pending else next(stored) for key in keys]

    def put(self, key: bytes, value: bytes | None) -> None:
        """Set or, with None, delete one key. Raises: InvalidError (not bytes, too large), DiskFull, ClosedError."""
        if not isinstance(key, bytes) or not isinstance(value, bytes | None):
            raise self._not_bytes([key], [value])
        size = len(key) + len(value or b"")
        if size > self._most_bytes:
            raise self._too_large(key, size)
        self._gather({key: value}, size)

    def write(self, changes: Collection[Change]) -> None:
        """Apply changes in order, all or none of them. Raises: as :meth:`put`."""
        try:
            newest = dict(changes)
        except TypeError:  # of no hash
            raise self._not_bytes([key for key, _ in changes]) from None
        if not (are_all(bytes, newest) and are_all(bytes | None, newest.values())):
            raise self._not_bytes(newest, newest.values())
        size = size_of(newest)
        if size > self._most_bytes:
            for key, value in newest.items():
                if (of_one := len(key) + len(value or b"")) > self._most_bytes:
                    raise self._too_large(key, of_one)
        if len(newest) >= self._batch_size:  # a batch by itself
            self.flush()
            self._apply(newest)
        else:
            self._gather(newest, size)

    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        """Delete all keys with ``start`` ≤ key < ``end``; None is an open end.

        A changelog has no range deletes. If a backend needs changes, each key is deleted by itself. This happens in
        batches, so that memory stays bounded and the change buffer can move to disk as usual. After an error some of
        the keys are deleted, both in the store and in the change buffer, and the call may be repeated.
        """
        self._check_bounds(start, end)
        self.flush()
        try:
            if self._changes is None:
                self._local.delete_range(start, end)
            else:
                self._delete_each(self._local.scan(start, end))
        except (CorruptFile, MissingFile) as error:
            raise self.give_up(error) from error

    def _delete_each(self, found: Items) -> None:
        try:
            while batch := dict.fromkeys(key for key, _ in islice(found, _RANGE_BATCH)):
                self._apply(batch)
        finally:
            found.close()

    def scan(self, start: bytes | None, end: bytes | None) -> Items:
        """Items with ``start`` ≤ key < ``end`` in key order, as of the call. Writes gathered changes first.

        Reading an item may raise CorruptFile, which the caller passes to :attr:`give_up`.
        """
        self._check_bounds(start, end)
        self.flush()
        try:
            return self._local.scan(start, end)
        except (CorruptFile, MissingFile) as error:
            raise self.give_up(error) from error

    def flush(self) -> None:
        """Write the gathered changes in one batch. Raises: DiskFull; then they stay gathered."""
        if self._closed:
            raise ClosedError("the store is closed", **self._where)
        if self._pending:
            self._apply(self._pending)

    def close(self) -> None:
        """Drop the gathered changes, which are not committed. Idempotent."""
        self._closed = True
        self._pending = {}

    def statistics(self) -> Mapping[str, float]:
        """The local store's statistics, the number of gathered changes, and how many keys were read and written."""
        return {
            **self._local.statistics(),
            "pending.changes": len(self._pending),
            "keys.read": self._keys_read,
            "keys.written": self._keys_written + len(self._pending),
        }

    def _gather(self, changes: dict[bytes, bytes | None], size: int) -> None:
        if self._closed:
            raise ClosedError("the store is closed", **self._where)
        if self._pending and (
            len(self._pending) + len(changes) > self._batch_size or self._pending_bytes + size > BATCH_BYTES
        ):
            self.flush()
        if self._batch_size == 1 or size > BATCH_BYTES:
            self._apply(changes)
        else:
            self._pending.update(changes)
            self._pending_bytes += size

    def _apply(self, changes: dict[bytes, bytes | None]) -> None:
        """Write one batch. Nothing else may be pending before it."""
        after_error, self._pending = self._pending, changes
        try:
            self._local.write(changes.items())
            after_error, self._pending_bytes = {}, 0
            self._keys_written += len(changes)
            if self._changes is not None:
                self._changes.extend(changes)
        except StatemgrError as error:
            self._pending = after_error
            if isinstance(error, CorruptFile | MissingFile):
                raise self.give_up(error) from error
            raise
        self._pending = {}
        self._pending_bytes = 0
        if self._changes is not None and self._on_much is not None and self._changes.has_unfrozen(self._much):
            self._on_much()

    def _too_large(self, key: bytes, size: int) -> InvalidError:
        return too_large(key, size, self._most_bytes, self._smaller, **self._where)

    def _check_bounds(self, *bounds: bytes | None) -> None:
        if not are_all(bytes | None, bounds):
            raise self._not_bytes([key for key in bounds if key is not None])

    def _not_bytes(self, keys: Iterable[object], values: Iterable[object] = ()) -> InvalidError:
        wrong = [("key", key) for key in keys if not isinstance(key, bytes)]
        wrong += [("value", value) for value in values if not isinstance(value, bytes | None)]
        what, given = wrong[0]
        store = self._where["store"]
        setting = f"stores.{store}.key.serde" if what == "key" else f"stores.{store}.value.serde"
        hint = f"set {setting} for other types, or pass a serde where the code asks for the store"
        if given is None:
            hint = "a message without a key has the key None: choose another key for it"
        return InvalidError(f"a {what} is not bytes, but {type(given).__name__}", hint=hint, **self._where)
