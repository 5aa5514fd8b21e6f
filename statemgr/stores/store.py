"""A store as an application sees it: get, put, delete, many at once, ranges and prefixes, through serdes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic

from statemgr import ports
from statemgr.config import StoreConfig
from statemgr.errors import CorruptError, CorruptFile, InvalidError, LocalStateLost, MissingFile, StatemgrError
from statemgr.serdes import SERDES, Serde
from statemgr.serdes.serde import K, T, V
from statemgr.stores.open_store import OpenStore


class Items(Iterator[tuple[K, V]], Generic[K, V]):
    """Items of a store in the order of their keys' bytes, read one by one, as of the call that returned them.

    Leaving a ``with`` block, :meth:`close`, the end of the items, and the store's close release the view.
    Raises: ClosedError for a step after that, LocalStateLost.
    """

    def __init__(
        self,
        scan: ports.Items,
        key_of: Callable[[bytes], K],
        value_of: Callable[[bytes], V],
        give_up: Callable[[CorruptFile | MissingFile], LocalStateLost],
    ) -> None:
        self._scan = scan
        self._give_up = give_up
        self._key_of = key_of
        self._value_of = value_of

    def __next__(self) -> tuple[K, V]:
        try:
            key, value = next(self._scan)
        except (CorruptFile, MissingFile) as error:
            raise self._give_up(error) from error
        return self._key_of(key), self._value_of(value)

    def close(self) -> None:
        """Release the view before the end. Idempotent."""
        self._scan.close()

    def __enter__(self) -> Items[K, V]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Store(Generic[K, V]):
    """Keyed state of one task. Bytes in and out, unless serdes are configured.

    ``K`` and ``V`` are the types of keys and values. A type checker knows those of a ``Serde`` or a pair of callables
    that is given in code. For the serdes of the configuration, annotate the variable: ``totals: Store[str, int]``.

    Reads see the store's own writes at once, and the next commit includes them. The store gathers writes
    (``stores.<name>.write.batch.size``), so a later call than the one that wrote may raise DiskFull. No change is lost
    then: repeat the call when there is space. After LocalStateLost, the local files are damaged or missing, and
    uncommitted changes are lost: open the task again.
    """

    def __init__(self, opened: OpenStore, key_serde: Serde[K], value_serde: Serde[V]) -> None:
        self._open = opened
        self._content = opened.entries
        self._key = _named(key_serde, "key", opened)
        self._value = _named(value_serde, "value", opened)
        #: Whether keys and values are plain bytes, which need no call of a serde for each item.
        self._plain = key_serde is value_serde is SERDES["bytes"]

    @property
    def name(self) -> str:
        return self._open.identity.store

    @property
    def config(self) -> StoreConfig:
        """The store's configuration."""
        return self._open.config

    @property
    def raw(self) -> Store[bytes, bytes]:
        """The same store without its serdes: bytes in and out."""
        return Store(self._open, SERDES["bytes"], SERDES["bytes"])

    def get(self, key: K) -> V | None:
        """The value of a key, or None. Raises: LocalStateLost, ClosedError."""
        found = self._content.get(self._key.serialize(key))
        return None if found is None else self._value.deserialize(found)

    def get_many(self, keys: Sequence[K]) -> list[V | None]:
        """The values of many keys, in their order; None for an absent key."""
        serialize, deserialize = self._key.serialize, self._value.deserialize
        found = self._content.get_many([serialize(key) for key in keys])
        return [None if value is None else deserialize(value) for value in found]

    def put(self, key: K, value: V) -> None:
        """Set a key's value. Refuses None: use :meth:`delete`. Raises: DiskFull, ClosedError."""
        if value is None:
            raise TypeError("None is not a value; use delete()")
        self._content.put(self._key.serialize(key), self._value.serialize(value))

    def put_many(self, items: Iterable[tuple[K, V]] | Mapping[K, V]) -> None:
        """Set many keys, all or none of them. Raises: as :meth:`put`."""
        pairs = list(items.items() if isinstance(items, Mapping) else items)
        for _, value in pairs:
            if value is None:
                raise TypeError("None is not a value; use delete_many()")
        if not self._plain:
            serialize_key, serialize = self._key.serialize, self._value.serialize
            pairs = [(serialize_key(key), serialize(value)) for key, value in pairs]
        self._content.write(pairs)

    def delete(self, key: K) -> None:
        """Remove a key; an absent one is no error."""
        self._content.put(self._key.serialize(key), None)

    def delete_many(self, keys: Iterable[K]) -> None:
        """Remove many keys, all or none of them."""
        serialize = self._key.serialize
        self._content.write([(serialize(key), None) for key in keys])

    def delete_range(self, start: K | None = None, end: K | None = None) -> None:
        """Remove all keys with ``start`` ≤ key < ``end`` in the order of the keys' bytes; None is an open end.

        If no backend records changes, this writes one tombstone. Otherwise it deletes each key, in batches of bounded
        memory: after DiskFull the first batches may already be deleted, and you can repeat the call.
        """
        self._content.delete_range(*self._bounds(start, end))

    def range(self, start: K | None = None, end: K | None = None) -> Items[K, V]:
        """Items with ``start`` ≤ key < ``end`` in the order of the keys' bytes, as of now; None is an open end."""
        return self._items(*self._bounds(start, end))

    def prefix(self, prefix: bytes) -> Items[K, V]:
        """Items whose key's bytes start with ``prefix``, in order, as of now. Raises: InvalidError (not bytes)."""
        if not isinstance(prefix, bytes):
            raise InvalidError(
                f"a prefix is bytes, not {type(prefix).__name__}",
                hint="encode it as the key serde does",
                task=self._open.identity.task,
                store=self.name,
            )
        return self._items(prefix, after_prefix(prefix))

    def statistics(self) -> Mapping[str, float]:
        """Numbers about the store: ``pending.changes``, ``keys.read`` and ``keys.written`` since it was opened (without
        scans; a key counts once per batch that is written), and its kind's own (``rocksdb.…`` by RocksDB's names,
        counters and latencies only with ``stores.<name>.rocksdb.statistics``; ``memory.keys``, ``memory.bytes``).
        """
        return self._content.statistics()

    def _bounds(self, start: K | None, end: K | None) -> tuple[bytes | None, bytes | None]:
        serialize = self._key.serialize
        return None if start is None else serialize(start), None if end is None else serialize(end)

    def _items(self, start: bytes | None, end: bytes | None) -> Items[K, V]:
        found = self._content.scan(start, end)
        return Items(found, self._key.deserialize, self._value.deserialize, self._content.give_up)


def _named(serde: Serde[T], what: str, opened: OpenStore) -> Serde[T]:
    """The serde, with errors that name the store and say whether a key or a value is wrong: InvalidError for values,
    CorruptError for stored bytes."""
    if serde is SERDES["bytes"]:
        return serde  # the store below checks its arguments
    where = {"task": opened.identity.task, "store": opened.identity.store}
    wrote_them = "use the serde that wrote them"
    other_serde = f"set stores.{opened.identity.store}.{what}.serde to another one"

    def explain(error: StatemgrError, kind: type[StatemgrError], hint: str) -> None:
        if isinstance(error, kind):  # and not of a server that the serde asks
            error.hint = error.hint or hint
        error.with_where(**where, part=what)

    def serialize(value: T) -> bytes:
        try:
            data = serde.serialize(value)
        except StatemgrError as error:
            explain(error, InvalidError, f"pass a {what} that the serde takes, or {other_serde}")
            raise
        except Exception as error:
            raise InvalidError(
                f"the {what} serde of the store does not take a {what} of type {type(value).__name__}: {error}",
                hint=f"pass the type that the serde takes, or {other_serde}",
                **where,
            ) from error
        if data is None:  # which would delete the key
            raise InvalidError(
                f"the {what} serde of the store returned None instead of bytes",
                hint="return bytes for every value, and call delete() to remove a key",
                **where,
            )
        return data

    def deserialize(data: bytes) -> T:
        try:
            return serde.deserialize(data)
        except StatemgrError as error:
            explain(error, CorruptError, wrote_them)
            raise
        except Exception as error:
            raise CorruptError(
                f"the {what} serde of the store cannot read the bytes of a {what}: {error}",
                hint=wrote_them,
                **where,
            ) from error

    return Serde(serialize, deserialize)


def after_prefix(prefix: bytes) -> bytes | None:
    """The first key after all that start with ``prefix``; None when there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None
