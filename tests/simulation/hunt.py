"""Looks for seeds that find each known fault, and writes them down: ``found.json``, and the table in ``docs/proof.md``.

Every change of the code or of the simulation moves histories a little, so a fault may no longer show at its seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.simulation.known_faults import FOUND, FOUND_BY, KNOWN

#: Seeds with a fault → the results of their histories.
Lived = Callable[[Sequence[tuple[int, str | None]]], Iterable[Mapping[str, object]]]
PAGE = Path(__file__).parents[2] / "docs/proof.md"
_AT_ONCE = 6


def hunt(seeds: range, lived: Lived) -> Mapping[str, int]:
    """Live the seed of each known fault, and for those that do not show there, one of ``seeds`` after the other.

    Returns: fault → seed, for those that are found.
    """
    found = {fault: FOUND_BY[fault] for fault in _failed(lived([(seed, fault) for fault, seed in FOUND_BY.items()]))}
    for at in range(0, len(seeds), _AT_ONCE):
        some = seeds[at : at + _AT_ONCE]
        left = [fault for fault in KNOWN if fault not in found]
        for fault, seed in _failed(lived([(seed, fault) for fault in left for seed in some])).items():
            print(f"{fault}: {seed}", flush=True)
            found[fault] = seed
    return found


def _failed(results: Iterable[Mapping[str, object]]) -> dict[str, int]:
    """The first seed of each fault that shows."""
    first: dict[str, int] = {}
    for result in results:
        fault, seed = str(result["fault"]), int(str(result["seed"]))
        if result["error"] is not None and seed <= first.get(fault, seed):
            first[fault] = seed
    return first


def write(found: Mapping[str, int]) -> None:
    """Write down what was found."""
    FOUND.write_text(json.dumps({fault: found.get(fault) for fault in KNOWN}, indent=2) + "\n")
    PAGE.write_text("\n".join(_with_rows(PAGE.read_text().split("\n"), [*rows(found)])))


def rows(found: Mapping[str, int]) -> Iterator[str]:
    """The lines of the page's table. A fault without a seed has a dash."""
    for fault, make in KNOWN.items():
        yield f"| `{fault}` | {found.get(fault, '–')} | {' '.join((make.__doc__ or '').split())} |"


def _with_rows(lines: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """The lines of the page, with all rows of faults replaced."""
    left = [*new]
    for line in lines:
        if any(line.startswith(f"| `{fault}`") for fault in KNOWN):
            yield from left
            left.clear()
        else:
            yield line
