"""The result of a run of the demo: its starts, the totals of all sides, and whether they are equal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

from statemgr_tools.demo.child import Outcome
from statemgr_tools.demo.first_answer import FirstAnswer
from statemgr_tools.demo.timeline import Timeline
from statemgr_tools.demo.verify import Side


@dataclass
class Start:
    """One start of the pipeline: the backend of its restores, its batches, and its outcome.

    ``aimed`` is the phase of the planned kill, or None for the start that runs to the end.
    """

    restore: str | None
    outcome: Outcome
    reports: list[dict[str, Any]] = field(default_factory=list)
    aimed: str | None = None

    def restored(self) -> list[dict[str, Any]]:
        """The reports of stores that came from a backend."""
        tasks = [task for report in self.reports for task in report["tasks"]]
        stores = [store for task in tasks for store in task["restored"]]
        return [store for store in stores if store["factory"] not in ("local", "empty")]

    def restores(self) -> list[dict[str, Any]]:
        """Return factories, number of tasks, slowest seconds, and total bytes and records for each store."""
        found = []
        stores = self.restored()
        for name in sorted({store["store"] for store in stores}):
            ours = [store for store in stores if store["store"] == name]
            found.append(
                {
                    "store": name,
                    "factories": sorted({store["factory"] for store in ours}),
                    "tasks": len(ours),
                    "slowest_seconds": max(store["seconds"] for store in ours),
                    "bytes_fetched": sum(store["bytes_fetched"] for store in ours),
                    "records": sum(store["records"] for store in ours),
                }
            )
        return found

    def replayed(self) -> int:
        """The number of batches that only repeated their output."""
        return sum(report["replayed"] for report in self.reports)


@dataclass(frozen=True)
class Summary:
    """A finished run. ``sides`` begins with the recount. ``rows`` is the number of rows on the topic.

    ``first_answer``: how long a task with a large state takes to its first answer, and until its whole state is here.
    """

    seed: int
    blob: str
    directory: str
    word: str
    measures: Sequence[str]
    rows: int
    starts: Sequence[Start]
    sides: Sequence[Side]
    listing: str
    seconds: float
    first_answer: FirstAnswer | None = None

    @property
    def equal(self) -> bool:
        """Whether every key of every side equals the recount exactly, and every row was counted."""
        return equal(self.sides, self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON."""
        return {
            "seed": self.seed,
            "blob": self.blob,
            "directory": self.directory,
            "rows": self.rows,
            "starts": [
                {
                    "restored_from": start.restore,
                    "aimed_at": start.aimed,
                    "killed_in": start.outcome.hit,
                    "batches": len(start.reports),
                    "replayed": start.replayed(),
                    "seconds": round(start.outcome.seconds, 3),
                    "restores": start.restores(),
                }
                for start in self.starts
            ],
            "first_answer": asdict(self.first_answer) if self.first_answer is not None else None,
            "totals": totals(self.sides, self.measures),
            "equal": self.equal,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Command:
    """A command that the demo ran successfully: its text and its seconds."""

    text: str
    seconds: float


@dataclass(frozen=True)
class MigrationSummary:
    """A finished run of ``--migrate``. ``sides`` begins with the recount. ``rows``: the number of rows on the topic."""

    seed: int
    directory: str
    word: str
    measures: Sequence[str]
    rows: int
    commands: Sequence[Command]
    kills: int
    timeline: Timeline
    sides: Sequence[Side]
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether every key of every side equals the recount exactly, and every row was counted."""
        return equal(self.sides, self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON."""
        return {
            "seed": self.seed,
            "directory": self.directory,
            "rows": self.rows,
            "commands": [asdict(command) for command in self.commands],
            "kills": self.kills,
            "timeline": self.timeline.to_dict(),
            "totals": totals(self.sides, self.measures),
            "equal": self.equal,
            "seconds": round(self.seconds, 3),
        }


def equal(sides: Sequence[Side], rows: int) -> bool:
    """Return whether every key of every side equals the first side's exactly, and that side counted every row."""
    truth = sides[0]
    return truth.total()[1] == rows and not any(differences(truth, side) for side in sides[1:])


def totals(sides: Sequence[Side], names: Sequence[str]) -> dict[str, Any]:
    """Return each side's totals as JSON. Sums and largest values are texts, because JSON numbers would round them."""
    found = {}
    for side in sides:
        keys, rows, unparsable, missing, sums, largest = side.total()
        measures = {
            name: {
                "missing": missing[i] if keys else 0,
                "sum": plain_text(sums[i]) if keys else "0",
                "largest": plain_text(largest[i]) if keys else None,
            }
            for i, name in enumerate(names)
        }
        found[side.name] = {
            "keys": keys,
            "rows": rows,
            "unparsable": unparsable,
            "measures": measures,
            "different_keys": len(differences(sides[0], side)),
        }
    return found


def differences(truth: Side, side: Side) -> list[str]:
    """Return the keys whose tallies differ, in words."""
    keys = sorted({*truth.tallies, *side.tallies})
    return [
        f"{side.name}: key {key!r} has {side.tallies.get(key)}, the recount {truth.tallies.get(key)}"
        for key in keys
        if truth.tallies.get(key) != side.tallies.get(key)
    ]


def plain_text(value: Decimal | None, form: str = "f") -> str | None:
    """Return all digits, without an exponent or trailing zeros. ``,f`` groups thousands."""
    if value is None:
        return None
    text = format(value, form)
    return text.rstrip("0").rstrip(".") if "." in text else text
