"""One codec for every record. It walks a schema and a dataclass together, once. Pure.

=====================  ==================================================================
Avro                   Python
=====================  ==================================================================
record                 a dataclass with fields of the same names, or a tuple of fixed length
union of records       a union of dataclasses of the same names
union with null        ``T | None``, for the fields of a dataclass
array                  ``tuple[T, ...]``
map                    ``Mapping[str, T]``, written in the order of its keys
everything else        ``str``, ``int``, ``bool``, ``bytes``
=====================  ==================================================================

Fields of a dataclass that the schema lacks are not written, and have their defaults when they are read. A type of
another shape than its schema has a :class:`Form`. A rule that no schema can express is a function of the value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from statemgr.errors import CorruptError, InvalidError
from statemgr.model.codecs.schemas import single_objects
from statemgr.serdes.avro import SingleObjects

_T = TypeVar("_T")
_Convert = Callable[[Any], Any]
_PRIMITIVES = {"string": str, "int": int, "long": int, "boolean": bool, "bytes": bytes, "fixed": bytes}

#: Makes the typed error of a decoder from what is wrong.
Refuse = Callable[[str], CorruptError]


class Form(NamedTuple):
    """A type that is written as another type, or as a ``dict`` of a record's fields in Avro's own form.

    ``back`` raises ValueError or InvalidError for impossible values.
    """

    type: Any
    to: _Convert
    back: _Convert


class Shapes(NamedTuple):
    """``forms``: type → its form. ``rules``: dataclass → a function that returns a value that was read, or raises
    ValueError if it is impossible."""

    forms: Mapping[Any, Form]
    rules: Mapping[type, _Convert]


class Codec(Generic[_T]):
    """Values of one dataclass ↔ single objects of one schema.

    Args:
        kind: the dataclass, or ``dict`` for the fields in Avro's own form.
        most: the most bytes of an encoded value.
    """

    def __init__(self, schema: str, kind: type[_T], shapes: Shapes, most: int | None = None) -> None:
        self._name, self._kind, self._shapes = schema, kind, shapes
        self._most = most

    def encode(self, value: _T, **where: str) -> bytes:
        """Raises: InvalidError with ``where`` if the value does not fit the schema or the limit."""
        write, _ = self._converters
        try:
            data = self._objects.encode(write(value) if write else value)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidError(f"a value does not fit the schema {self._name}: {error}", **where) from error
        if self._most is not None and len(data) > self._most:
            raise InvalidError(f"{self._name} has {len(data)} bytes, and may have {self._most}", **where)
        return data

    def decode(self, data: bytes, refuse: Refuse) -> _T:
        """Raises: the error that ``refuse`` makes, for bytes that are not exactly one possible value."""
        if self._most is not None and len(data) > self._most:
            raise refuse(f"it is larger than {self._most} bytes")
        _, read = self._converters
        try:
            value = self._objects.decode(data)
            return read(value) if read else value  # type: ignore[no-any-return]
        except (ValueError, InvalidError) as error:
            raise refuse(str(error)) from error

    @property
    def header(self) -> bytes:
        """The first bytes of every value that is written."""
        return self._objects.header

    @property
    def headers(self) -> Collection[bytes]:
        """The first bytes of every value that is read: of this schema, and of older ones."""
        return self._objects.headers

    @cached_property
    def _objects(self) -> SingleObjects:
        return single_objects(self._name)

    @cached_property
    def _converters(self) -> _Converters:
        return _Walk(self._shapes).of(self._objects.schema, self._kind)


class _Converters(NamedTuple):
    """The functions that convert a type to Avro and back; None if Avro has the same value."""

    write: _Convert | None
    read: _Convert | None


_SAME = _Converters(None, None)


class _Walk:
    """Finds the converters of a schema and a type."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._named: dict[str, Any] = {}

    def of(self, schema: Any, kind: Any) -> _Converters:
        """Raises: TypeError if the type is not that of the schema."""
        if isinstance(schema, dict) and "name" in schema:
            self._named[schema["name"]] = schema
        if isinstance(schema, str):
            schema = self._named.get(schema, schema)
        if kind is dict:
            return _SAME
        if kind in self._shapes.forms:
            return self._form(schema, self._shapes.forms[kind])
        if isinstance(schema, list):
            return self._union(schema, get_args(kind))
        match schema["type"] if isinstance(schema, dict) else schema:
            case "record":
                return self._record(schema, kind)
            case "array":
                return _array(*self.of(schema["items"], get_args(kind)[0]))
            case "map":
                return _map(*self.of(schema["values"], get_args(kind)[1]))
            case other if kind is _PRIMITIVES.get(other):
                return _SAME
        raise TypeError(f"{kind} is not of the Avro type {schema}")

    def _form(self, schema: Any, form: Form) -> _Converters:
        (_, to, back), (write, read) = form, self.of(schema, form.type)
        return _Converters(
            (lambda value: write(to(value))) if write else to,
            (lambda value: back(read(value))) if read else back,
        )

    def _union(self, schemas: list[Any], kinds: Sequence[Any]) -> _Converters:
        members = [self._named[member] if isinstance(member, str) else member for member in schemas]
        names = {member["name"].rpartition(".")[2]: member for member in members}
        if names.keys() != {kind.__name__ for kind in kinds}:
            raise TypeError(f"{kinds} are not the members of the Avro union {list(names)}")
        found = {kind: self.of(names[kind.__name__], kind) for kind in kinds}
        writers = {kind: (names[kind.__name__]["name"], write or _same) for kind, (write, _) in found.items()}
        readers = {names[kind.__name__]["name"]: read or _same for kind, (_, read) in found.items()}

        def to_pair(value: Any) -> tuple[str, Any]:
            name, write = writers[type(value)]
            return name, write(value)

        return _Converters(to_pair, lambda pair: readers[pair[0]](pair[1]))

    def _record(self, schema: Any, kind: Any) -> _Converters:
        names = [field["name"] for field in schema["fields"]]
        is_tuple = get_origin(kind) is tuple
        hints = dict(zip(names, get_args(kind), strict=True)) if is_tuple else get_type_hints(kind)
        writers: list[tuple[str, _Convert]] = []
        readers: list[tuple[str, _Convert]] = []
        for field in schema["fields"]:
            name = field["name"]
            write, read = self.of(*_without_null(field["type"], hints[name]))
            writers += [(name, write)] if write else []
            readers += [(name, read)] if read else []
        made = _tuple if is_tuple else kind
        rule = self._shapes.rules.get(kind)
        # one call gets all fields, and the loops are over those with another form in Avro only: this is as fast as
        # generated code
        get: _Convert = tuple if is_tuple else attrgetter(*names) if len(names) > 1 else _only(names[0])

        def to_fields(value: Any) -> dict[str, Any]:
            fields = dict(zip(names, get(value), strict=True))
            for name, write in writers:
                if fields[name] is not None:
                    fields[name] = write(fields[name])
            return fields

        def from_fields(fields: dict[str, Any]) -> Any:
            for name, read in readers:
                if fields[name] is not None:
                    fields[name] = read(fields[name])
            value = made(**fields)
            return value if rule is None else rule(value)

        return _Converters(to_fields, from_fields)


def _only(name: str) -> _Convert:
    get = attrgetter(name)
    return lambda value: (get(value),)


def _without_null(schema: Any, kind: Any) -> tuple[Any, Any]:
    """The schema and the type of a field that is not None."""
    if not isinstance(schema, list) or "null" not in schema:
        return schema, kind
    (member,) = (member for member in schema if member != "null")
    (other,) = (other for other in get_args(kind) if other is not type(None))
    return member, other


def _tuple(**fields: Any) -> tuple[Any, ...]:
    return tuple(fields.values())


def _same(value: Any) -> Any:
    return value


def _array(write: _Convert | None, read: _Convert | None) -> _Converters:
    return _Converters(
        (lambda items: [write(item) for item in items]) if write else None,
        (lambda items: tuple([read(item) for item in items])) if read else tuple,
    )


def _map(write: _Convert | None, read: _Convert | None) -> _Converters:
    return _Converters(
        (lambda items: {key: write(items[key]) for key in sorted(items)})
        if write
        else (lambda items: dict(sorted(items.items()))),
        (lambda items: {key: read(item) for key, item in items.items()}) if read else None,
    )
