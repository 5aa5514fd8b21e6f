"""Faults that the project once had, or that others have, and that the simulation must find when they are put back.

A function makes the patches of one fault. Its docstring says in one sentence what the fault is, and where it is from.
:data:`FOUND_BY` has a seed of each that fails with it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from tests.simulation.known_faults import backends, clean_up, local, owners  # each adds its own
from tests.simulation.known_faults.registry import KNOWN, put_back

__all__ = ["FOUND", "FOUND_BY", "KNOWN", "NOT_FOUND", "backends", "clean_up", "local", "owners", "put_back"]

#: Fault → a seed that fails with it, the first one where all before it were tried; null if none of those was found.
#: ``python -m tests.simulation --hunt`` writes it.
FOUND = Path(__file__).with_name("found.json")
_seeds: Mapping[str, int | None] = json.loads(FOUND.read_text())
FOUND_BY: Mapping[str, int] = {fault: seed for fault, seed in _seeds.items() if seed is not None}
#: Faults that no seed has found so far.
NOT_FOUND: Collection[str] = _seeds.keys() - FOUND_BY.keys()
