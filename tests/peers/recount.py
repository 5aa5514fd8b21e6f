"""What applications of Kafka Streams should have in their stores, computed from the rows alone. Pure.

:func:`apply` does to stores what ``StreamsTopology.java`` lets Kafka Streams do for one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from tests.peers.streams import AGGREGATES, TABLES, Row, Step

#: Key, or key and start of a window, or key, start and end of a session → value, as Kafka Streams prints it.
Content = dict[Any, str]
_KNOWN = {"stream", "map", "processor", "join", "filter"} | TABLES | AGGREGATES


def known(steps: Iterable[Step]) -> bool:
    """Whether :func:`apply` knows what the stores should have."""
    return all(
        step["op"] in _KNOWN and "sliding" not in step and step.get("kind", "table-table") == "table-table"
        for step in steps
    )


def keeps_keys(steps: Iterable[Step]) -> bool:
    """Whether the stores have the keys of the input, so that a new job can go on with it."""
    return all("by" not in step for step in steps)


def differences(one: Mapping[str, Content], other: Mapping[str, Content]) -> list[object]:
    """Where two states differ: store, key, and both values."""
    return [
        (store, key, one.get(store, {}).get(key), other.get(store, {}).get(key))
        for store in one.keys() | other.keys()
        for key in one.get(store, {}).keys() | other.get(store, {}).keys()
        if one.get(store, {}).get(key) != other.get(store, {}).get(key)
    ]


def recount(steps: Sequence[Step], rows: Iterable[Row]) -> dict[str, Content]:
    """What the stores should have after these rows."""
    stores: dict[str, Content] = {step["store"]: {} for step in steps if "store" in step}
    for row in rows:
        apply(steps, stores, row)
    return stores


def apply(steps: Sequence[Step], stores: Mapping[str, MutableMapping[Any, str]], row: Row) -> None:
    """Do to the stores what the application does for one row."""
    made: dict[str, tuple[str, str | None]] = {}
    for step in steps:
        op, name = step["op"], step["as"]
        if op in ("stream", "table") and step["topic"] == row.topic:
            made[name] = row.key, row.value
        elif step.get("of") in made:
            key, value = made[step["of"]]
            if "store" in step and step["store"] not in stores:
                continue
            if op == "map":
                made[name] = key, None if value is None else value + step["add"]
            elif op in AGGREGATES:
                _aggregate(step, stores[step["store"]], f"g{value or 'null'}" if "by" in step else key, value, row.time)
            elif op == "processor":
                _put(stores[step["store"]], key, value and str(int(stores[step["store"]].get(key, "0")) + 1))
            elif op == "to-table":
                made[name] = key, value
            elif op == "filter":
                made[name] = key, None if value is None or value.endswith("0") else value
        if op == "join" and {step["of"], step["with"]} & made.keys():
            one, other = (_of(steps, stores, step[side]).get(row.key) for side in ("of", "with"))
            made[name] = row.key, None if one is None or other is None else one + other
        if name in made and op in TABLES | {"filter", "join"} and step.get("store") in stores:
            _put(stores[step["store"]], *made[name])


def _of(steps: Iterable[Step], stores: Mapping[str, MutableMapping[Any, str]], name: str) -> MutableMapping[Any, str]:
    return next(stores[step["store"]] for step in steps if step["as"] == name)


def _put(store: MutableMapping[Any, str], key: Any, value: str | None) -> None:
    if value is None:
        store.pop(key, None)
    else:
        store[key] = value


def _aggregate(step: Step, store: MutableMapping[Any, str], key: str, value: str | None, at: int) -> None:
    if value is None and not {"gap", "size"} & step.keys():
        return  # windows and sessions count rows without a value, too
    if "gap" in step:
        start, end, rows = at, at, 1
        for old in [
            old for old in store if old[0] == key and old[1] <= at + step["gap"] and at - step["gap"] <= old[2]
        ]:
            start, end, rows = min(start, old[1]), max(end, old[2]), rows + int(store.pop(old))
        store[key, start, end] = str(rows)
        return
    for place in _places(step, key, at):
        before = store.get(place)
        if step["op"] == "max":
            store[place] = max(before or "", value or "")
        else:
            store[place] = str(int(before or "0") + (len(value or "") if step["op"] == "sum" else 1))


def _places(step: Step, key: str, at: int) -> list[Any]:
    if "size" not in step:
        return [key]
    size, advance = step["size"], step.get("advance", step["size"])
    starts = range(at // advance * advance, at - size, -advance)
    return [(key, start) for start in starts if start >= 0]
