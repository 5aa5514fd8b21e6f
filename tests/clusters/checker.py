"""Checks a history: what clients did and saw must be one line of commits per task, in the manner of Jepsen's elle.

Each commit has a unique name, which it writes into the state, so what a client reads says which commit it stands on.
From this the checker infers the order of commits, without looking into any server: the newest read of a task and the
bases before it are the *line*. Then it tells what contradicts the line:

1. a read of something that nobody committed, or of a commit that has no place on the line: two owners, or a lost commit
2. a commit that was acknowledged and is not on the line, or that failed and is on it
3. a read or a commit that began after something was acknowledged or seen, and stands on something older
4. content that is not what the line makes, and values that a commit has read and that were not so (lost updates)
5. input that is processed twice, in the wrong order, or not at all
6. output that no commit of the line has sent, and output that is missing
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Content = Mapping[str, str]
#: As many contradictions of each task are told.
_MOST = 20


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A commit that a client tried.

    ``base``: the commit on which it stands; None for the beginning. ``reads``: the values that it read there (None: no
    such key). ``began`` and ``ended`` are seconds of one clock. ``unknown`` is the outcome of a client that died, too.
    """

    name: str
    task: str
    base: str | None
    inputs: Sequence[str] = ()
    reads: Mapping[str, str | None] = field(default_factory=dict)
    writes: Mapping[str, str | None] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    began: float = 0.0
    ended: float = math.inf
    outcome: Literal["ok", "fail", "unknown"] = "unknown"


@dataclass(frozen=True, kw_only=True)
class Read:
    """The whole content of a task that a client saw, and the name of the commit in it; None for an empty start."""

    task: str
    found: str | None
    content: Content
    began: float
    ended: float


@dataclass(kw_only=True)
class History:
    """What clients did and saw. ``inputs`` and ``outputs`` are task → what there is in the end; None: nobody looked."""

    commits: list[Commit] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    inputs: Mapping[str, Sequence[str]] | None = None
    outputs: Mapping[str, Sequence[str]] | None = None

    def problems(self) -> list[str]:
        """Return what contradicts exactly-once processing; nothing for a right history."""
        named = Counter(commit.name for commit in self.commits)
        found = [f"two commits have the name {name}" for name, count in named.items() if count > 1]
        for task in sorted({one.task for one in (*self.commits, *self.reads)} | set(self.inputs or ())):
            told = list(_Line(self, task).problems())
            found += [f"{task}: {problem}" for problem in told[:_MOST]]
            if len(told) > _MOST:
                found.append(f"{task}: and {len(told) - _MOST} more")
        return found


class _Line:
    """The commits of a task that took effect, in their order. Position 0 is the empty start."""

    def __init__(self, history: History, task: str) -> None:
        self._history, self._task = history, task
        self._tried = {commit.name: commit for commit in history.commits if commit.task == task}
        self._reads = sorted((read for read in history.reads if read.task == task), key=lambda read: read.began)
        self.commits: list[Commit] = []
        self._broken: str | None = None
        name, seen = self._reads[-1].found if self._reads else None, set[str]()
        while name is not None:
            if name not in self._tried or name in seen:
                self._broken = f"somebody has seen {name}, which nobody has committed"
                break
            seen.add(name)
            self.commits.append(self._tried[name])
            name = self._tried[name].base
        self.commits.reverse()
        self._place: dict[str | None, int] = {None: 0}
        self._place |= {commit.name: number for number, commit in enumerate(self.commits, 1)}

    def problems(self) -> Iterator[str]:
        if self._broken:
            yield self._broken
        yield from self._outcomes()
        yield from self._forks()
        yield from self._times()
        yield from self._contents()
        yield from self._inputs()
        yield from self._outputs()

    def _outcomes(self) -> Iterator[str]:
        for commit in self._tried.values():
            if commit.outcome == "ok" and commit.name not in self._place:
                yield f"{commit.name} was acknowledged and is lost"
            if commit.outcome == "fail" and commit.name in self._place:
                yield f"{commit.name} failed and took effect"

    def _forks(self) -> Iterator[str]:
        """Of two commits with one base, only one may take effect."""
        on = {commit.base: commit.name for commit in self.commits}
        effective = {read.found for read in self._reads} | {c.name for c in self._tried.values() if c.outcome == "ok"}
        for name in sorted(name for name in effective if name is not None and name not in self._place):
            if name not in self._tried:
                yield f"somebody has seen {name}, which nobody has committed"
                continue
            beside: str | None = name
            while beside in self._tried and beside not in self._place:
                beside = self._tried[beside].base
            other = on.get(beside, "the newest read")
            yield f"{name} took effect next to {other}: both stand on {beside or 'the empty start'}"

    def _times(self) -> Iterator[str]:
        """Whoever begins after an acknowledgement or a read stands on it, or on something newer."""
        known = [(c.ended, self._place[c.name], c.name) for c in self.commits if c.outcome == "ok"]
        known += [(r.ended, self._place[r.found], str(r.found)) for r in self._reads if r.found in self._place]
        known.sort(key=lambda one: one[0])
        began = [(r.began, self._place[r.found], f"a read of {r.found}") for r in self._reads if r.found in self._place]
        began += [(c.began, self._place[c.name], c.name) for c in self.commits]
        began.sort(key=lambda one: one[0])
        newest, name, at = 0, "", 0
        for moment, place, what in began:
            while at < len(known) and known[at][0] < moment:
                newest, name = max((newest, name), known[at][1:])
                at += 1
            if place < newest:
                yield f"{what} is stale: it began after {name} was known"

    def _contents(self) -> Iterator[str]:
        """What was read is what the line's writes make, both in commits and in reads of everything."""
        of_place: dict[int, list[Read]] = {}
        for read in self._reads:
            if read.found in self._place:
                of_place.setdefault(self._place[read.found], []).append(read)
        state: dict[str, str] = {}
        for place, commit in enumerate([None, *self.commits]):
            if commit is not None:
                for key, value in commit.reads.items():
                    if state.get(key) != value:
                        yield (
                            f"lost update: {commit.name} has read {key} = {value} on {commit.base}, "
                            f"where it was {state.get(key)}"
                        )
                for key, value in commit.writes.items():
                    if value is None:
                        state.pop(key, None)
                    else:
                        state[key] = value
            for read in of_place.get(place, ()):
                if read.content != state:
                    keys = sorted(k for k in {*state, *read.content} if state.get(k) != read.content.get(k))
                    pairs = [f"{k} = {read.content.get(k)} instead of {state.get(k)}" for k in keys[:3]]
                    yield f"a read of {read.found} has {len(keys)} wrong values: {', '.join(pairs)}"

    def _inputs(self) -> Iterator[str]:
        done = [name for commit in self.commits for name in commit.inputs]
        times = Counter(done)
        yield from (f"input {name} was processed {count} times" for name, count in times.items() if count > 1)
        if self._history.inputs is None:
            return
        expected = self._history.inputs.get(self._task, ())
        yield from (f"input {name} was skipped" for name in expected if name not in times)
        known = set(expected)
        yield from (f"input {name} was made up" for name in times if name not in known)
        if times == Counter(expected) and done != list(expected) and all(len(c.inputs) < 2 for c in self.commits):
            yield "input was processed in another order"

    def _outputs(self) -> Iterator[str]:
        if self._history.outputs is None:
            return
        expected = Counter(output for commit in self.commits for output in commit.outputs)
        found = Counter(self._history.outputs.get(self._task, ()))
        yield from (
            f"output without a commit: {output} ({count} times)" for output, count in (found - expected).items()
        )
        yield from (f"output is missing: {output} ({count} times)" for output, count in (expected - found).items())
