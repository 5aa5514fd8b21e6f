"""Makes a history that fails shorter: fewer owners, fewer kinds of faults, and then fewer events, as long as it fails.

Every event of the world is one chance that came true, and has a name. A history can be lived again without some of
them (Zeller's ddmin: first without halves, then without smaller parts). An error of another type is another failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields

from tests.simulation.history import History
from tests.simulation.servers import Faults

#: Lives a history. Returns: the error with which it ended.
Live = Callable[[History], BaseException | None]
Failure = tuple[History, BaseException]


def shortest(seed: int, live: Live, seconds: float = 60.0) -> tuple[History, BaseException | None]:
    """The shortest history of a seed that fails as its history does; the whole one if it goes well.

    Args:
        seconds: when to stop looking for a shorter one.
    """
    whole = History(seed)
    error = live(whole)
    if error is None:
        return whole, None
    until, kind = time.monotonic() + seconds, type(error)
    without, quiet = frozenset[str](), frozenset[str]()
    owners: int | None = None

    def fails() -> Failure | None:
        history = History(seed, without=without, owners=owners, quiet=quiet)
        found = live(history)
        return (history, found) if type(found) is kind else None

    best: Failure = whole, error
    for fewer in range(1, 8):
        owners = fewer
        if shorter := fails():
            best = shorter
            break
    else:
        owners = None
    for name in [field.name for field in fields(Faults)]:
        before, without = without, without | {name}
        if shorter := fails():
            best = shorter
        else:
            without = before
    parts = 2
    while time.monotonic() < until and (events := best[0].scheduler.events):
        for part in _parts(events, parts):
            before, quiet = quiet, quiet | part
            if shorter := fails():
                best = shorter
                break
            quiet = before
            if time.monotonic() > until:
                break
        else:
            if parts >= len(events):
                break
            parts = min(2 * parts, len(events))
    return best


def _parts(events: Sequence[str], count: int) -> list[frozenset[str]]:
    size = -(-len(events) // count)
    return [frozenset(events[at : at + size]) for at in range(0, len(events), size)]
