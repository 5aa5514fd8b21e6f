"""State variables in a store of the task: the objects that ``StatefulProcessorHandle`` returns on an executor.

Keys in the store, where NAME is the variable's name and KEY the bytes of the grouping key (``keys.py``)::

    s NAME KEY                a value, or the bounds of a list (index of the first element, and after the last one)
    s NAME KEY INDEX          an element of a list; the index has 8 bytes
    s NAME KEY MAPKEY         a value of a map
    x EXPIRY <one of these>   an entry of the index of expiries, of a variable with a TTL

A value with a TTL begins with its expiry: 8 bytes, epoch milliseconds. It is gone once the batch's time has reached it.
The end of the batch deletes the expired values one by one, and segments and changelogs contain these deletes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pyspark.sql.streaming.stateful_processor import ListState, MapState, ValueState
from pyspark.sql.types import Row, StructType

from spark_integration.processors.keys import decode_key, encode_key
from spark_integration.processors.refusals import not_initialized, refusal
from spark_integration.processors.timers import LAST_MS
from spark_integration.processors.values import to_internal, value_serde
from spark_integration.processors.variables import LIST, Variable
from statemgr import Store
from statemgr.errors import CorruptError

_STATE, _EXPIRY = b"s", b"x"
#: The end of a name in a key.
_END = b"\x00\x01"
#: Bytes of an index, an expiry and a time.
INT = 8
#: Types that already have the form that Spark needs.
_PYTHONS = frozenset((int, str, float, bool, bytes, type(None)))
#: Number of grouping keys whose values are read together.
_AHEAD = 256
#: Number of a list's elements that are read without a scan, and of elements or expired values that are deleted at once.
_CHUNK = 1000


class Batch:
    """The data that all variables of a task share during a batch: the store, the time and the current grouping key."""

    def __init__(self, store: Store, time_ms: int) -> None:
        self.store = store
        self.time_ms = time_ms
        self._key: bytes | None = None
        #: Grouping keys of the current record batch in their order, and the position of each one.
        self._coming: list[bytes] = []
        self._position: dict[bytes, int] = {}

    def coming(self, keys: Iterable[bytes]) -> None:
        """Note the grouping keys of a record batch, which may repeat."""
        self._coming = list(dict.fromkeys(keys))
        self._position = {key: i for i, key in enumerate(self._coming)}

    def next_keys(self) -> list[bytes]:
        """Return the current grouping key and some of the next ones."""
        position = self._position.get(self._key or b"")
        return [] if position is None else self._coming[position : position + _AHEAD]

    def set_key(self, key: bytes | None) -> None:
        self._key = key

    def key(self, doing: str) -> bytes:
        """The bytes of the grouping key. Raises: PySparkRuntimeError while no key is handled."""
        if self._key is None:
            raise refusal(doing, "INTERNAL_ERROR", reason="Implicit key not found in state store")
        return self._key


class Cells:
    """The values of one variable: bytes in the store ↔ rows, with their expiries and the index of expiries.

    ``is_deleted``: ``init`` has deleted the variable after it had declared it.
    """

    is_deleted = False

    def __init__(self, batch: Batch, variable: Variable) -> None:
        self.batch = batch
        self.store = batch.store
        self.name, self.kind = variable.name, variable.kind
        self.prefix = variable_prefix(variable.name)
        self._schema = variable.schema
        #: Whether Spark's internal form of a field differs from the one that a processor sees.
        self._converts = any(field.dataType.needConversion() for field in variable.schema.fields)
        self._serde = value_serde(variable.versions)
        self._ttl_ms = variable.ttl_ms
        #: The stored bytes at the places of some grouping keys: the current one and the next ones.
        self._ahead: dict[bytes, bytes | None] = {}

    def place(self, doing: str) -> bytes:
        """Return the start of the places of the variable's values for the current grouping key.

        Raises: PySparkRuntimeError if ``init`` has deleted the variable.
        """
        if self.is_deleted:
            raise not_initialized(doing, self.kind, self.name)
        return self.prefix + self.batch.key(doing)

    def own(self, place: bytes) -> bytes | None:
        """Return the bytes at the grouping key's own place. Also read the places of the next keys."""
        if place not in self._ahead:
            places = [self.prefix + key for key in self.batch.next_keys()] or [place]
            self._ahead = dict(zip(places, self.store.get_many(places), strict=True))
        return self._ahead[place]

    def write(self, items: Sequence[tuple[bytes, bytes]]) -> None:
        """Write bytes to places."""
        if len(items) == 1:
            self.store.put(*items[0])
        else:
            self.store.put_many(items)
        self._ahead.update((place, data) for place, data in items if place in self._ahead)

    def remove(self, places: Sequence[bytes]) -> None:
        """Delete places."""
        self.store.delete_many(places)
        self._ahead.update((place, None) for place in places if place in self._ahead)

    def read(self, data: bytes | None) -> Row | None:
        """Return the row in a value's bytes; None if they are absent or have expired."""
        internal = self._internal(data)
        return None if internal is None else self._schema.fromInternal(internal)

    def fields(self, data: bytes | None) -> tuple[Any, ...] | None:
        """Return the row like :meth:`read`, but without the names of the fields."""
        internal = self._internal(data)
        if internal is None or not self._converts:
            return internal
        return tuple(self._schema.fromInternal(internal))

    def _internal(self, data: bytes | None) -> tuple[Any, ...] | None:
        if data is None or not self.is_live(data):
            return None
        found: tuple[Any, ...] = self._serde.deserialize(data if self._ttl_ms is None else data[INT:])
        return found

    def is_live(self, data: bytes) -> bool:
        return self._ttl_ms is None or _number(data) > self.batch.time_ms

    def put(self, places: Sequence[bytes], values: Sequence[Any], *, new: bool = False) -> None:
        """Write values, each with a new expiry. ``new``: the places are empty.

        Raises: InvalidError for a value that cannot be stored. Nothing has changed then.
        """
        rows = [self._serde.serialize(to_internal(self._schema, _row(value), "value")) for value in values]
        if self._ttl_ms is None:
            self.write(list(zip(places, rows, strict=True)))
            return
        old = [] if new else self._expiries(places)
        expiry = _bytes(min(self.batch.time_ms + self._ttl_ms, LAST_MS))
        self.write([(place, expiry + row) for place, row in zip(places, rows, strict=True)])
        self.store.delete_many(old)
        self.store.put_many([(_EXPIRY + expiry + place, b"") for place in places])

    def delete(self, places: Sequence[bytes]) -> None:
        if self._ttl_ms is not None:
            self.store.delete_many(self._expiries(places))
        self.remove(places)

    def _expiries(self, places: Sequence[bytes]) -> list[bytes]:
        """Return the entries of the places in the index of expiries."""
        found = zip(places, self.store.get_many(places), strict=True)
        return [_EXPIRY + data[:INT] + place for place, data in found if data is not None]


class StoredValue(ValueState):
    """A value state."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def exists(self) -> bool:
        return self._cells.read(self._cells.own(self._cells.place("checking value state exists"))) is not None

    def get(self) -> tuple[Any, ...] | None:
        return self._cells.fields(self._cells.own(self._cells.place("getting value state")))

    def update(self, newValue: tuple[Any, ...]) -> None:
        self._cells.put([self._cells.place("updating value state")], [newValue])

    def clear(self) -> None:
        self._cells.delete([self._cells.place("clearing value state")])


class StoredList(ListState):
    """A list state: its bounds, and a key for each element, so that appending does not read the list.

    An iteration shows the list as it was when it began.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def exists(self) -> bool:
        return next(self._rows(self._cells.place("checking value state exists")), None) is not None

    def get(self) -> Iterator[tuple[Any, ...]]:
        return (tuple(row) for row in self._rows(self._cells.place("getting list state")))

    def put(self, newState: list[tuple[Any, ...]]) -> None:
        place = self._cells.place("updating value state")
        values = self._checked(newState)
        first, end = bounds(self._cells.own(place))
        self._write(place, first, first, values, new=first == end)
        self._delete(place, first + len(values), end)

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        self._append(self._cells.place("updating value state"), [newState])

    def appendList(self, newState: list[tuple[Any, ...]]) -> None:
        self._append(self._cells.place("updating value state"), self._checked(newState))

    def clear(self) -> None:
        place = self._cells.place("clearing value state")
        self._delete(place, *bounds(self._cells.own(place)))
        self._cells.remove([place])

    def _checked(self, values: Iterable[Any]) -> list[Any]:
        found = list(values)
        if not found:
            raise refusal("updating value state", "ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE", name=self._cells.name)
        return found

    def _append(self, place: bytes, values: list[Any]) -> None:
        first, end = bounds(self._cells.own(place))
        self._write(place, first, end, values, new=True)

    def _write(self, place: bytes, first: int, at: int, values: list[Any], *, new: bool) -> None:
        """Write elements from index ``at``, where the list then ends. A refused one leaves the list as it was."""
        end = at + len(values)
        self._cells.put([place + _bytes(i) for i in range(at, end)], values, new=new)
        self._cells.write([(place, _bytes(first) + _bytes(end))])

    def _delete(self, place: bytes, start: int, end: int) -> None:
        for first in range(start, end, _CHUNK):
            self._cells.delete([place + _bytes(i) for i in range(first, min(end, first + _CHUNK))])

    def _rows(self, place: bytes) -> Iterator[Row]:
        first, end = bounds(self._cells.own(place))
        store = self._cells.store
        if end - first <= _CHUNK:  # a scan would first write the changes that the store has gathered
            return self._read(store.get_many([place + _bytes(i) for i in range(first, end)]))
        found = store.range(place + _bytes(first), place + _bytes(end))

        def read() -> Iterator[Row]:
            with found as items:
                yield from self._read(data for _, data in items)

        return read()

    def _read(self, stored: Iterable[bytes | None]) -> Iterator[Row]:
        return (row for data in stored if (row := self._cells.read(data)) is not None)


class StoredMap(MapState):
    """A map state. Iterates in the order of its keys, and shows the map as it was when the iteration began."""

    def __init__(self, cells: Cells, key: StructType) -> None:
        self._cells = cells
        self._key = key

    def exists(self) -> bool:
        return next(self._items("checking map state exists"), None) is not None

    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return self._get(key, "getting value")

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        return self._get(key, "checking if map state contains key") is not None

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        self._cells.put([self._at(key, "updating map state value")], [value])

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        return ((tuple(key), tuple(value)) for key, value in self._items("getting map state"))

    def keys(self) -> Iterator[tuple[Any, ...]]:
        return (tuple(key) for key, _ in self._items("getting map state"))

    def values(self) -> Iterator[tuple[Any, ...]]:
        return (tuple(value) for _, value in self._items("getting map state"))

    def removeKey(self, key: tuple[Any, ...]) -> None:
        self._cells.delete([self._at(key, "removing key from map state")])

    def clear(self) -> None:
        with self._cells.store.prefix(self._cells.place("clearing map state")) as items:
            for places in chunks(place for place, _ in items):
                self._cells.delete(places)

    def _get(self, key: tuple[Any, ...], doing: str) -> Row | None:
        return self._cells.read(self._cells.store.get(self._at(key, doing)))

    def _at(self, key: tuple[Any, ...], doing: str) -> bytes:
        return self._cells.place(doing) + encode_key(self._key, to_internal(self._key, _row(key), "key"))

    def _items(self, doing: str) -> Iterator[tuple[Row, Row]]:
        start = self._cells.place(doing)
        found = self._cells.store.prefix(start)  # now, and not at the first step

        def read() -> Iterator[tuple[Row, Row]]:
            with found as items:
                for place, data in items:
                    row = self._cells.read(data)
                    if row is not None:
                        key, _ = decode_key(self._key, place, len(start))
                        yield self._key.fromInternal(key), row

        return read()


def delete_variable(store: Store, name: str) -> None:
    """Delete all values of a variable, for every grouping key. Its entries in the index expire at their own time."""
    prefix = variable_prefix(name)
    with store.prefix(prefix) as items:
        is_there = next(items, None) is not None
    if is_there:
        store.delete_range(prefix, prefix[:-1] + b"\x02")


def list_prefixes(variables: Iterable[Variable]) -> frozenset[bytes]:
    """Yield the start of the places of each list."""
    return frozenset(variable_prefix(variable.name) for variable in variables if variable.kind == LIST)


def delete_expired(batch: Batch, lists: frozenset[bytes]) -> int:
    """Delete the expired values and their entries in the index. Returns: their number.

    Args:
        lists: the result of :func:`list_prefixes`.
    """
    store, deleted = batch.store, 0
    with store.range(_EXPIRY, _EXPIRY + _bytes(batch.time_ms + 1)) as items:
        for entries in chunks(entry for entry, _ in items):
            places = [entry[1 + INT :] for entry in entries]
            # an entry points to nothing if its value was deleted with its variable, or written again since
            current = [
                place
                for entry, place, data in zip(entries, places, store.get_many(places), strict=True)
                if data is not None and data[:INT] == entry[1 : 1 + INT]
            ]
            store.delete_many([*entries, *current])
            deleted += len(current)
            of_lists = [place[:-INT] for place in current if place[: place.index(_END) + len(_END)] in lists]
            for place in dict.fromkeys(of_lists):
                _shorten(store, place)
    return deleted


def first_expiry(store: Store) -> int | None:
    """Return the earliest time at which :func:`delete_expired` has something to delete, in epoch milliseconds."""
    with store.prefix(_EXPIRY) as items:
        return next((_number(entry, 1) for entry, _ in items), None)


def bounds(data: bytes | None) -> tuple[int, int]:
    """Return the index of a list's first element, and the index after its last one."""
    return (0, 0) if data is None else (_number(data), _number(data, INT))


def chunks(items: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield lists of a bounded length."""
    part: list[bytes] = []
    for item in items:
        part.append(item)
        if len(part) == _CHUNK:
            yield part
            part = []
    if part:
        yield part


def _row(value: Any) -> Any:
    """Convert what a processor passes as a row. As on Spark, a text is the row of its characters."""
    return tuple(value) if isinstance(value, str) else plain(value)


def plain(value: Any) -> Any:
    """Convert NumPy's and pandas' scalars in a value to Python's, as Spark does with what a processor writes."""
    if type(value) is tuple and all(type(item) in _PYTHONS for item in value):
        return value
    if isinstance(value, Row) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return type(value)(*[plain(item) for item in value])
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if hasattr(value, "to_pytimedelta"):
        return value.to_pytimedelta()
    if hasattr(value, "to_pydatetime"):
        return value.to_pydatetime()
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    return value


def _shorten(store: Store, place: bytes) -> None:
    """Move the start of a list past its deleted elements. Delete an empty list."""
    first, end = bounds(store.get(place))
    while first < end and store.get(place + _bytes(first)) is None:
        first += 1
    if first < end:
        store.put(place, _bytes(first) + _bytes(end))
    else:
        store.delete(place)


def variable_prefix(name: str) -> bytes:
    """Return the start of the places of a variable."""
    return _STATE + name.encode().replace(b"\x00", b"\x00\xff") + _END


def _bytes(number: int) -> bytes:
    return number.to_bytes(INT, "big")


def _number(data: bytes, at: int = 0) -> int:
    if len(data) < at + INT:
        raise CorruptError("a stored value is too short", hint="only a processor's query may write to its store")
    return int.from_bytes(data[at : at + INT], "big")
