"""A few seconds of what ``make fuzz`` does for minutes, and a check that it finds what is wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.fuzzing import Mutator
from tests.fuzz.targets import TARGETS
from tests.limited import run_limited


def test_targets_end_with_typed_errors(tmp_path: Path) -> None:
    """Every decoder, the configuration, the command line, the page and answers of servers, with mutated inputs."""
    right, said = fuzz([*TARGETS], 0.15, random.randrange(1 << 31), tmp_path)
    assert right, said


#: One target does what it must not, each in its own way.
WRONG = """
import sys
from pathlib import Path
from tests.fuzz import fuzzing, targets

def wrong(data):
    kind = sys.argv[2]
    if kind == "raises":
        raise KeyError("raw")
    if kind == "hangs":
        while True: pass
    return bytearray(1 << 33)

targets.TARGETS["wrong"] = targets.Target(wrong, [], each_s=0.3)
print(fuzzing.main())
"""


@pytest.mark.parametrize(
    ("kind", "error"), [("raises", "KeyError"), ("hangs", "TooSlow"), ("takes memory", "MemoryError")]
)
def test_what_is_wrong_is_found(tmp_path: Path, kind: str, error: str) -> None:
    """An error without a type, an input that takes too long, and one that takes too much memory; each is kept."""
    order = {"targets": ["wrong"], "seconds": 20, "seed": 1, "corpus": str(tmp_path)}
    said = run_limited(WRONG, json.dumps(order), kind)
    assert f"wrong: {error}" in said
    [kept] = (tmp_path / "found" / "wrong").iterdir()
    assert str(kept) in said


def test_inputs_that_reach_new_lines_are_kept() -> None:
    """The mutator finds its way through conditions that follow each other."""
    mutator = Mutator([b"aaaa"], random.Random(1), Path(__file__))

    def deep(data: bytes) -> bool:
        if data[:1] <= b"x":
            return False
        if data[1:2] >= b"A":
            return False
        return len(data) > 12

    for _ in range(50_000):
        data = mutator.mutated()
        if mutator.traced(deep, data):
            mutator.corpus.append(data)
        if deep(data):
            return
    pytest.fail("no input went through all conditions")
