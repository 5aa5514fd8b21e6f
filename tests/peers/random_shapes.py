"""Random applications of Kafka Streams, each from a seed: steps, names, settings and rows."""

from __future__ import annotations

import string
from collections.abc import Iterable
from random import Random

from tests.peers.shapes import Shape
from tests.peers.streams import Row

_LETTERS = string.ascii_letters + string.digits + "._-"
#: Ends of names that are like those of Kafka Streams, but for one.
_ENDS = ("", "", "", "-this-join-store", "-repartition", "-changelog", "-subscription-store", "-0000000003")
_SETTINGS = (
    {},
    {},
    {"processing.guarantee": "exactly_once_v2"},
    {"group.protocol": "streams"},
    {"topology.optimization": "all"},
    {"dsl.store.format": "headers"},
)


def random_shape(seed: int) -> Shape:
    """Make an application."""
    random = Random(seed)
    made = _Steps(random)
    for _ in range(random.randint(1, 4)):
        random.choice((made.aggregate, made.aggregate, made.table, made.processor, made.join, made.suppress))()
    settings = dict(random.choice(_SETTINGS) | random.choice(_SETTINGS))
    return Shape(made.steps, settings, ending=random.choice(("all", "all", "early")))


def random_rows(seed: int, topics: Iterable[str], begin: int, most: int = 250) -> list[Row]:
    """Make rows, with a time in milliseconds that grows from ``begin`` on."""
    random = Random(seed)
    key = random.choice(
        (
            lambda: f"key-{random.randrange(40)}",
            lambda: str(random.randrange(10**6, 10**6 + 30)),
            lambda: "".join(random.choices("ab\u00e9\U0001f600|", k=random.randint(1, 3))),
            lambda: random.choice("xyz") * random.randint(1, 60),
        )
    )
    topics, rows = list(topics), []
    for _ in range(random.randint(80, most)):
        begin += random.randrange(4000)
        value = None if random.random() < 0.05 else f"v{random.randrange(9)}"
        rows.append(Row(random.choice(topics), key(), value, begin))
    return rows


class _Steps:
    """Steps that follow from each other."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.steps: list[dict[str, object]] = []
        self._streams = [self._add(op="stream", topic=topic) for topic in ("rows", "other")[: random.randint(1, 2)]]
        self._tables: list[str] = []
        self._counts: list[str] = []
        if random.random() < 0.3:
            self._tables.append(self._add(op="table", topic="names", store=self._name(), uncached=True))

    def aggregate(self) -> None:
        """Add a count, a reduction or an aggregation, perhaps by another key and in windows."""
        more: dict[str, object] = {"op": self._random.choice(("count", "max", "sum"))}
        if self._random.random() < 0.3:
            more["by"] = "value"
            if self._random.random() < 0.5:
                more["group"] = self._name()
        windows = self._random.choice(
            ({}, {}, {}, {"size": 60_000}, {"size": 60_000, "advance": 20_000}, {"gap": 9_000})
        )
        if windows:
            more |= {"op": "count", "grace": 3_600_000, **windows}
        elif self._random.random() < 0.2:
            more["plain"] = True
        self._counts.append(self._stored(of=self._random.choice(self._streams), **more))

    def table(self) -> None:
        """Add a table of a stream, perhaps a versioned one, and perhaps a filter of it."""
        more: dict[str, object] = {"versioned": 3_600_000} if self._random.random() < 0.2 else {}
        table = self._stored(op="to-table", of=self._random.choice(self._streams), **more)
        if not more:
            self.steps[-1]["uncached"] = True  # see tests/peers/shapes.py
            self._tables.append(table)
            if self._random.random() < 0.3:
                self._stored(op="filter", of=table)

    def processor(self) -> None:
        """Add a store of the processor API."""
        form = self._random.choice(("plain", "timestamped", "headers"))
        self._add(op="processor", of=self._random.choice(self._streams), store=self._name(), format=form)

    def join(self) -> None:
        """Add a join of two tables or of two streams, if there are two."""
        if len(self._tables) > 1 and self._random.random() < 0.7:
            one, other = self._random.sample(self._tables, 2)
            kind = self._random.choice(("table-table", "foreign-key"))
            named = {"name": self._name()} if kind == "foreign-key" and self._random.random() < 0.5 else {}
            self._add(op="join", kind=kind, of=one, store=self._name(), **{"with": other}, **named)
        elif len(self._streams) > 1:
            named = {"name": self._name(), "store": self._name()} if self._random.random() < 0.5 else {}
            outer = {"outer": True} if self._random.random() < 0.5 else {}
            one, other = self._streams
            self._add(op="join", kind="stream-stream", of=one, size=60_000, **{"with": other}, **named, **outer)
        else:
            self.aggregate()

    def suppress(self) -> None:
        """Add a suppression of a count that was added before."""
        plain = [step["as"] for step in self.steps if step["as"] in self._counts and not {"size", "gap"} & step.keys()]
        if plain:
            named = {"name": self._name()} if self._random.random() < 0.5 else {}
            self._add(op="suppress", of=self._random.choice(plain), **named)
        else:
            self.aggregate()

    def _stored(self, **step: object) -> str:
        """Add a step with a store, which has a name or not, and some options."""
        options: dict[str, object] = {}
        # Kafka Streams makes no store for a table without a name
        is_table = step["op"] not in ("count", "max", "sum")
        named = {"versioned", "plain"} & step.keys() or is_table or self._random.random() < 0.7
        if named:
            options["store"] = self._name()
        if self._random.random() < 0.3:
            options["uncached"] = True
        if self._random.random() < 0.2 and not {"versioned", "plain"} & step.keys():
            options["memory"] = True
        return self._add(**step, **options)

    def _add(self, **step: object) -> str:
        name = f"s{len(self.steps)}"
        self.steps.append({"as": name, **step})
        return name

    def _name(self) -> str:
        """Return a name that Kafka allows."""
        letters = "".join(self._random.choices(_LETTERS, k=self._random.choice((1, 3, 8, 60))))
        return f"n{len(self.steps)}{letters}{self._random.choice(_ENDS)}"
