"""A store as an application sees it: get, put, delete, many at once, ranges and prefixes, through serdes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from statemgr.flows.open_store import OpenStore
from statemgr.serdes import Serde


class Store:
    """Keyed state of one task. Bytes in and out, unless serdes are configured.

    Reads see the store's own writes at once. What is written becomes part of the next commit.
    """

    def __init__(self, opened: OpenStore, key_serde: Serde, value_serde: Serde) -> None:
        self._open = opened
        self._key = key_serde
        self._value = value_serde

    @property
    def name(self) -> str:
        return self._open.identity.store

    def get(self, key: Any) -> Any | None:
        """The value of a key, or None."""
        found = self._open.local.get(self._key.serialize(key))
        return None if found is None else self._value.deserialize(found)

    def get_many(self, keys: Sequence[Any]) -> list[Any | None]:
        """The values of many keys, in their order; None where a key is absent."""
        serialize, deserialize = self._key.serialize, self._value.deserialize
        found = self._open.local.get_many([serialize(key) for key in keys])
        return [None if value is None else deserialize(value) for value in found]

    def put(self, key: Any, value: Any) -> None:
        """Set a key's value. None as value is refused: use :meth:`delete`. Raises: DiskFull, ClosedError."""
        if value is None:
            raise TypeError("None is not a value; use delete()")
        self._open.write([(self._key.serialize(key), self._value.serialize(value))])

    def put_many(self, items: Iterable[tuple[Any, Any]] | Mapping[Any, Any]) -> None:
        """Set many keys, all or none of them."""
        pairs = items.items() if isinstance(items, Mapping) else items
        serialize_key, serialize = self._key.serialize, self._value.serialize
        self._open.write([(serialize_key(key), serialize(value)) for key, value in pairs])

    def delete(self, key: Any) -> None:
        """Remove a key; an absent one is no error."""
        self._open.write([(self._key.serialize(key), None)])

    def delete_many(self, keys: Iterable[Any]) -> None:
        """Remove many keys, all or none of them."""
        serialize = self._key.serialize
        self._open.write([(serialize(key), None) for key in keys])

    def range(self, start: Any | None = None, end: Any | None = None) -> Iterator[tuple[Any, Any]]:
        """Items with ``start`` ≤ key < ``end`` in the order of the keys' bytes, as of now; None is an open end."""
        serialize = self._key.serialize
        return self._items(None if start is None else serialize(start), None if end is None else serialize(end))

    def prefix(self, prefix: bytes) -> Iterator[tuple[Any, Any]]:
        """Items whose key's bytes start with ``prefix``, in order, as of now."""
        return self._items(prefix, _after_prefix(prefix))

    def _items(self, start: bytes | None, end: bytes | None) -> Iterator[tuple[Any, Any]]:
        key_of, value_of = self._key.deserialize, self._value.deserialize
        for key, value in self._open.local.scan(start, end):
            yield key_of(key), value_of(value)


def _after_prefix(prefix: bytes) -> bytes | None:
    """The first key after all that start with ``prefix``; None when there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None
