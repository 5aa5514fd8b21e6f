"""The state variables that a processor declares, and their record in every checkpoint. Pure.

The record is an attachment of the first task's checkpoint, as JSON: the columns of the grouping key, the time mode, and
for each variable its kind, its TTL, the schema of a map's keys, and every schema that its values have had, oldest
first. It names the store of the state, and the watermark of the next batch. Schemas are Spark's JSON. The record keeps
variables that the processor does not declare at present, because their state stays until ``deleteIfExists``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spark_integration.processors.values import unreadable
from statemgr.errors import CorruptRecord, InvalidError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: Name of the attachment.
RECORD = "processor-state"
VALUE, LIST, MAP = "value", "list", "map"
_FORMAT = 1
_HINT = "keep the old declaration, or declare a variable of another name and fill it from the old one"


@dataclass(frozen=True)
class Variable:
    """A state variable. ``versions``: the schemas of its values, oldest first. New values have the last one.

    ``ttl_ms`` is the declared duration in milliseconds; None if values do not expire.
    """

    name: str
    kind: str
    versions: tuple[StructType, ...]
    key: StructType | None = None
    ttl_ms: int | None = None

    @property
    def schema(self) -> StructType:
        return self.versions[-1]


@dataclass(frozen=True)
class Declared:
    """The declarations of a processor's ``init`` on the driver.

    ``deleted``: the names that it deletes → the declaration, where it declared the variable before. ``parsed``: DDL
    text → its schema, because workers cannot parse it.
    """

    variables: Mapping[str, Variable]
    deleted: Mapping[str, Variable | None] = field(default_factory=dict)
    parsed: Mapping[str, StructType] = field(default_factory=dict)

    def visible(self, record: Record) -> dict[str, Variable]:
        """Return the variables that ``init`` may ask for: those of the record, and those that it deletes itself."""
        return {**{name: one for name, one in self.deleted.items() if one is not None}, **record.variables}

    def counts(self) -> dict[str, int]:
        """Return the numbers of variables under the names of Spark's metrics."""
        found = {"numDeletedStateVars": len(self.deleted)}
        for kind in (VALUE, LIST, MAP):
            own = [variable.ttl_ms for variable in self.variables.values() if variable.kind == kind]
            found[f"num{kind.capitalize()}StateVars"] = own.count(None)
            found[f"num{kind.capitalize()}StateWithTTLVars"] = len(own) - own.count(None)
        return found


@dataclass(frozen=True)
class Record:
    """A checkpoint's record of a processor's state. ``key``: the grouping columns. ``store``: the state's store.

    ``watermark_ms``: the watermark of the next batch in epoch milliseconds, if the rows of this one have moved it.
    """

    key: StructType
    store: str
    time_mode: str
    variables: Mapping[str, Variable]
    watermark_ms: int | None = None

    def to_bytes(self) -> bytes:
        """Encode the attachment."""
        variables = {
            name: {
                "kind": variable.kind,
                "ttl_ms": variable.ttl_ms,
                "key": None if variable.key is None else variable.key.jsonValue(),
                "values": [version.jsonValue() for version in variable.versions],
            }
            for name, variable in sorted(self.variables.items())
        }
        return json.dumps(
            {
                "format": _FORMAT,
                "key": self.key.jsonValue(),
                "store": self.store,
                "time_mode": self.time_mode,
                "variables": variables,
                # version 0.1.0 ignores it
                **({} if self.watermark_ms is None else {"watermark_ms": self.watermark_ms}),
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Decode the attachment. Raises: CorruptRecord, also for a format of a newer version."""
        from pyspark.sql.types import StructType

        def schema(found: Any) -> StructType:
            return StructType.fromJson(found)

        try:
            found = json.loads(data)
            if found["format"] != _FORMAT:
                raise CorruptRecord(
                    f"the record of a processor's state has format {found['format']}; only {_FORMAT} is known",
                    hint="use the release that wrote the checkpoint, or a newer one",
                )
            variables = {
                name: Variable(
                    name,
                    one["kind"],
                    tuple(schema(version) for version in one["values"]),
                    None if one["key"] is None else schema(one["key"]),
                    one["ttl_ms"],
                )
                for name, one in found["variables"].items()
            }
            watermark_ms = found.get("watermark_ms")
            return cls(schema(found["key"]), found["store"], found["time_mode"], variables, watermark_ms)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CorruptRecord(f"the record of a processor's state cannot be read: {error}") from error

    def with_declared(self, declared: Declared) -> Record:
        """Return the record after the next batch, without deleted variables and with changed schemas as new versions.

        Raises: InvalidError for a change that cannot be resolved.
        """
        kept = {name: variable for name, variable in self.variables.items() if name not in declared.deleted}
        merged = dict(kept)
        for name, variable in declared.variables.items():
            merged[name] = _merged(kept[name], variable) if name in kept else variable
        return replace(self, variables=merged)

    def check_same(self, key: StructType, time_mode: str) -> None:
        """Compare the query with the record. Raises: InvalidError for other grouping columns or another time mode."""
        old = [(column.name, column.dataType.simpleString()) for column in self.key.fields]
        new = [(column.name, column.dataType.simpleString()) for column in key.fields]
        if old != new:
            raise InvalidError(
                f"the state is grouped by {_columns(old)}, and the query by {_columns(new)}",
                hint="group by the same columns, in the same order",
            )
        if self.time_mode != time_mode:
            raise InvalidError(
                f"the state has timers and TTLs of time mode {self.time_mode}, and the query has {time_mode}",
                hint="keep the time mode",
            )


def _merged(old: Variable, new: Variable) -> Variable:
    if old.kind != new.kind:
        raise InvalidError(
            f"the state variable {old.name!r} was a {old.kind} state and is a {new.kind} state",
            hint=_HINT,
            variable=old.name,
        )
    if (old.ttl_ms is None) != (new.ttl_ms is None):
        was, now = ("without", "with") if old.ttl_ms is None else ("with", "without")
        raise InvalidError(
            f"the state variable {old.name!r} was declared {was} a TTL and is now {now} one",
            hint="a TTL can change its duration only; " + _HINT,
            variable=old.name,
        )
    if old.key is not None and new.key is not None and _types(old.key) != _types(new.key):
        raise InvalidError(
            f"the keys of the map state {old.name!r} were {old.key.simpleString()} and are {new.key.simpleString()}",
            hint=_HINT,
            variable=old.name,
        )
    for version in old.versions:  # the state may have values of every version
        reason = unreadable(version, new.schema)
        if reason is not None:
            raise InvalidError(
                f"the state variable {old.name!r} has values that the new schema cannot read: {reason}",
                hint="fields may be added and removed, and a number may become a wider one; " + _HINT,
                variable=old.name,
            )
    written = [version.json() for version in old.versions]
    if new.schema.json() == written[-1]:
        return replace(new, versions=old.versions)
    others = [version for version in old.versions if version.json() != new.schema.json()]
    return replace(new, versions=(*others, new.schema))


def _types(schema: StructType) -> Collection[str]:
    return [column.dataType.simpleString() for column in schema.fields]


def _columns(columns: list[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns)
