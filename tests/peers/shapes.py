"""Shapes of applications of Kafka Streams, and what comes of adopting each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.peers.streams import Step

_EXACTLY_ONCE = {"processing.guarantee": "exactly_once_v2"}
_STREAMS_PROTOCOL = {"group.protocol": "streams"}
_OPTIMISED = {"topology.optimization": "all"}
_MINUTE, _DAY = 60_000, 86_400_000
_ROWS: Step = {"as": "rows", "op": "stream", "topic": "rows"}
_OTHER: Step = {"as": "other", "op": "stream", "topic": "other"}
_COUNT: Step = {"as": "count", "op": "count", "of": "rows", "store": "totals"}


@dataclass(frozen=True)
class Shape:
    """An application.

    Attributes:
        refused: the store that the refusal names (or a topic), and why; None if it is adopted as it is.
        options: with these it is adopted all the same. ``{job}`` is the application.
        left: stores that are not adopted.
        ending: how it is stopped: ``all`` (when it has read all rows), ``early`` (before that), ``killed`` (early, by
            force), or ``aborted`` (after all; the input has aborted transactions and an open one).
        expired: whether the application no longer shows windows that the new job gets.
    """

    steps: Sequence[Step]
    settings: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, str] | None = None
    options: Sequence[str] = ()
    left: Sequence[str] = ()
    ending: str = "all"
    expired: bool = False

    @property
    def outcome(self) -> str:
        """Return what comes of it, as the page about migrations has it."""
        equal = f"equal, without `{'`, `'.join(self.left)}`" if self.left else "equal"
        if self.expired:
            equal += ", with windows that the application no longer shows"
        return told(self.refused, self.options, equal)


def told(refused: tuple[str, str] | None, options: Sequence[str], equal: str = "equal") -> str:
    """What comes of adopting a job, for people.

    Args:
        refused: what the refusal names, and why.
        options: with these the job is adopted all the same.
        equal: what it means that it is adopted.
    """
    if refused is None:
        return equal
    said = f"refused: `{refused[0]}`, {refused[1]}"
    confirmed = [of for option, of in pairwise(options) if option == "--confirm"]
    named = [of.partition("=")[0] for option, of in pairwise(options) if option == "--changelog"]
    if "--blobs" in options:
        return f"{said}; {equal} with `--blobs`"
    if confirmed:
        return f"{said}; {equal} with {' '.join(f'`--confirm {of}`' for of in confirmed)}"
    return f"{said}; {equal} with `--changelog` for `{'`, `'.join(named)}`" if named else said


def _changelogs(*stores: str) -> list[str]:
    return [word for store in stores for word in ("--changelog", f"{store}={{job}}-{store}-changelog")]


def _windows(**more: object) -> list[Step]:
    return [_ROWS, {**_COUNT, "store": "hops", "size": _MINUTE, "retention": _DAY, **more}]


def _processor(form: str, **more: object) -> list[Step]:
    return [_ROWS, {"as": "counted", "op": "processor", "of": "rows", "store": "totals", "format": form, **more}]


_BY_VALUE: Step = {**_COUNT, "by": "value"}
_OTHER_KEYS = ("totals", "other keys than the input")
#: Kafka Streams keeps a joined value if both sides delete the key within one commit, and are cached.
_TWO_TABLES: list[Step] = [
    _ROWS,
    _OTHER,
    {"as": "left", "op": "to-table", "of": "rows", "store": "left", "uncached": True},
    {"as": "right", "op": "to-table", "of": "other", "store": "right", "uncached": True},
]


SHAPES: dict[str, Shape] = {
    "count": Shape([_ROWS, _COUNT]),
    "count, the store unnamed": Shape([_ROWS, {key: of for key, of in _COUNT.items() if key != "store"}]),
    "count, without caching": Shape([_ROWS, {**_COUNT, "uncached": True}]),
    "count, in memory": Shape([_ROWS, {**_COUNT, "memory": True}]),
    "count, stopped with unread input": Shape([_ROWS, _COUNT], ending="early"),
    "reduce": Shape([_ROWS, {**_COUNT, "op": "max"}]),
    "aggregate, in a store without timestamps": Shape([_ROWS, {**_COUNT, "op": "sum", "plain": True}]),
    "count, in a store with headers": Shape([_ROWS, _COUNT], {"dsl.store.format": "headers"}),
    "two counts in sub-topologies of their own": Shape(
        [_ROWS, _OTHER, _COUNT, {**_COUNT, "as": "others", "of": "other", "store": "others"}]
    ),
    "processor, plain store": Shape(_processor("plain")),
    "processor, timestamped store": Shape(_processor("timestamped")),
    "processor, store with headers and caching": Shape(_processor("headers", cached=True)),
    "processor, least-recently-used map": Shape(_processor("plain", lru=1000)),
    "exactly-once": Shape([_ROWS, _COUNT], _EXACTLY_ONCE),
    "exactly-once, killed inside a transaction": Shape([_ROWS, _COUNT], _EXACTLY_ONCE, ending="killed"),
    "exactly-once, aborted and open transactions in the input": Shape([_ROWS, _COUNT], _EXACTLY_ONCE, ending="aborted"),
    "streams protocol (KIP-1071)": Shape([_ROWS, _COUNT], _STREAMS_PROTOCOL),
    "streams protocol, exactly-once": Shape([_ROWS, _COUNT], _STREAMS_PROTOCOL | _EXACTLY_ONCE),
    "groupBy": Shape([_ROWS, _BY_VALUE], refused=_OTHER_KEYS, options=["--confirm", "totals"]),
    "groupBy, named": Shape(
        [_ROWS, {**_BY_VALUE, "group": "by-value"}], refused=_OTHER_KEYS, options=["--confirm", "totals"]
    ),
    "groupBy, exactly-once": Shape(
        [_ROWS, _BY_VALUE], _EXACTLY_ONCE, refused=_OTHER_KEYS, options=["--confirm", "totals"]
    ),
    "two groupBy of one stream, optimised": Shape(
        [
            _ROWS,
            {**_BY_VALUE, "group": "by-value"},
            {**_BY_VALUE, "as": "longest", "op": "max", "store": "longest", "group": "by-value-too"},
        ],
        _OPTIMISED,
        refused=("longest", "other keys than the input"),
        options=["--confirm", "totals", "--confirm", "longest"],
    ),
    "repartition by another key, then count": Shape(
        [_ROWS, {"as": "moved", "op": "repartition", "of": "rows", "name": "moved"}, {**_COUNT, "of": "moved"}],
        refused=_OTHER_KEYS,
        options=["--confirm", "totals"],
    ),
    "table": Shape([{"as": "names", "op": "table", "topic": "names", "store": "names"}]),
    "table, optimised": Shape(
        [{"as": "names", "op": "table", "topic": "names", "store": "names"}, _ROWS, _COUNT],
        _OPTIMISED,
        refused=("names", "no changelog has its keys and values"),
        options=[*_changelogs("totals"), "--changelog", "names=names.{job}"],
    ),
    "table grouped by another key": Shape(
        [
            {"as": "names", "op": "table", "topic": "names", "store": "names"},
            {"as": "counted", "op": "count-table", "of": "names", "store": "totals"},
        ],
        refused=_OTHER_KEYS,
        options=["--confirm", "totals"],
    ),
    "filter of a table": Shape(
        [
            _ROWS,
            {"as": "left", "op": "to-table", "of": "rows", "store": "left"},
            {"as": "few", "op": "filter", "of": "left", "store": "few"},
        ]
    ),
    "join of tables": Shape(
        [
            *_TWO_TABLES,
            {"as": "both", "op": "join", "kind": "table-table", "of": "left", "with": "right", "store": "both"},
        ]
    ),
    "foreign-key join": Shape(
        [
            *_TWO_TABLES,
            {"as": "fk", "op": "join", "kind": "foreign-key", "of": "left", "with": "right", "store": "both"},
        ],
        refused=("KTABLE-FK-JOIN-SUBSCRIPTION-STATE-STORE", "the subscriptions of a foreign-key join"),
        options=_changelogs("left", "right", "both"),
    ),
    "foreign-key join, named": Shape(
        [
            *_TWO_TABLES,
            {
                "as": "fk",
                "op": "join",
                "kind": "foreign-key",
                "of": "left",
                "with": "right",
                "store": "both",
                "name": "fk",
            },
        ],
        refused=("fk-subscription-store", "the subscriptions of a foreign-key join"),
        options=_changelogs("left", "right", "both"),
    ),
    "join of streams": Shape(
        [
            _ROWS,
            _OTHER,
            _COUNT,
            {"as": "both", "op": "join", "kind": "stream-stream", "of": "rows", "with": "other", "size": _MINUTE},
        ],
    ),
    "outer join of streams, named": Shape(
        [
            _ROWS,
            _OTHER,
            _COUNT,
            {
                "as": "both",
                "op": "join",
                "kind": "stream-stream",
                "of": "rows",
                "with": "other",
                "size": _MINUTE,
                "outer": True,
                "name": "pairs",
                "store": "pairs",
            },
        ],
        refused=("pairs-outer-shared-join-store", "that an outer or left join of streams has not matched"),
        options=_changelogs("totals", "pairs-outer-this-join-store", "pairs-outer-other-join-store"),
    ),
    "join of a stream and a table": Shape(
        [
            _ROWS,
            _COUNT,
            _OTHER,
            {"as": "right", "op": "to-table", "of": "other", "store": "right"},
            {"as": "both", "op": "join", "kind": "stream-table", "of": "rows", "with": "right"},
        ]
    ),
    "join of a stream and a global table": Shape(
        [
            _ROWS,
            _COUNT,
            {"as": "names", "op": "global-table", "topic": "names", "store": "names"},
            {"as": "both", "op": "join", "kind": "stream-global", "of": "rows", "with": "names"},
        ],
        left=["names"],
    ),
    "unlogged store next to a logged one": Shape(
        [_ROWS, _COUNT, {**_COUNT, "as": "more", "op": "sum", "store": "unlogged", "unlogged": True}], left=["unlogged"]
    ),
    "suppression until a time limit": Shape(
        [_ROWS, _COUNT, {"as": "late", "op": "suppress", "of": "count"}],
        refused=("KTABLE-SUPPRESS-STATE-STORE", "suppressed results"),
        options=_changelogs("totals"),
    ),
    "suppression, named": Shape(
        [_ROWS, _COUNT, {"as": "late", "op": "suppress", "of": "count", "name": "late"}],
        refused=("late", "suppressed results"),
        options=_changelogs("totals"),
    ),
    "tumbling windows": Shape(_windows()),
    "tumbling windows, some of them expired": Shape(_windows(retention=_MINUTE, uncached=True), expired=True),
    "hopping windows with grace, not cached": Shape(_windows(advance=20_000, grace=5_000, uncached=True)),
    "sliding windows": Shape(_windows(sliding=True)),
    "session windows": Shape([_ROWS, {**_COUNT, "store": "hops", "gap": 20_000, "retention": _DAY}]),
    "tumbling windows in memory": Shape(_windows(memory=True)),
    "tumbling windows with headers": Shape(_windows(), {"dsl.store.format": "headers"}),
    "tumbling windows, exactly-once, streams protocol": Shape(_windows(), _EXACTLY_ONCE | _STREAMS_PROTOCOL),
    "windows of another key than that of the input": Shape(
        _windows(by="value", grace=_DAY // 24),
        refused=("hops", "other keys than the input"),
        options=["--confirm", "hops=windows"],
    ),
    "tumbling windows, suppressed until closed": Shape(
        [*_windows(), {"as": "late", "op": "suppress", "of": "count", "until-closed": True}],
        refused=("KTABLE-SUPPRESS-STATE-STORE", "suppressed results"),
        options=_changelogs("hops"),
    ),
    "hopping windows whose changelog is only compacted": Shape(
        _windows(advance=20_000, changelog={"cleanup.policy": "compact"}),
        refused=("hops", "windows"),
        options=["--confirm", "hops=windows"],
    ),
    "versioned table": Shape(
        [_ROWS, {"as": "left", "op": "to-table", "of": "rows", "store": "left", "versioned": _MINUTE}],
        refused=("left", "min.compaction.lag.ms"),
        options=["--confirm", "left=versioned"],
    ),
    "versioned table whose changelog has no lag": Shape(
        [
            _ROWS,
            {
                "as": "left",
                "op": "to-table",
                "of": "rows",
                "store": "left",
                "versioned": _MINUTE,
                "changelog": {"min.compaction.lag.ms": "0"},
            },
        ],
        refused=("left", "min.compaction.lag.ms"),
        options=["--confirm", "left=versioned"],
    ),
}
