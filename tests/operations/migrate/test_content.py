"""The content hash of a store: its pairs in any order, and the newest record of each key of a changelog."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from statemgr.backends.changelog import digest
from statemgr.model import content
from statemgr.model.commit import Change
from statemgr.model.content import Content, differing, of_pairs

PAIRS = {f"key-{number}".encode(): b"v" * (number % 50) for number in range(3000)}


def records(seed: int, count: int = 20_000) -> list[Change]:
    """Return puts and deletes of few keys, so that later records overwrite most of them."""
    chosen = random.Random(seed)
    keys = [b"", b"\x00", *(chosen.randbytes(chosen.randrange(1, 20)) for _ in range(2000))]
    return [(chosen.choice(keys), chosen.choice([None, b"", chosen.randbytes(5)])) for _ in range(count)]


def state(changes: list[Change]) -> dict[bytes, bytes]:
    """Return the state after all the changes."""
    return {key: value for key, value in dict(changes).items() if value is not None}


def hashed(changes: list[Change], directory: Path, ranges: int = 3) -> Content:
    """Return the content of a changelog that is read in several ranges of offsets."""
    step = -(-len(changes) // ranges)
    for number in range(ranges):
        some = changes[number * step : (number + 1) * step]
        assert digest.read_rows((some[i : i + 70] for i in range(0, len(some), 70)), directory / str(number)) == len(
            some
        )
    parts = [[directory / str(n) / str(part) for n in range(ranges)] for part in range(content.WAYS)]
    return sum(map(digest.hash_rows, parts), Content())


def test_the_hash_does_not_depend_on_the_order_or_on_the_parts() -> None:
    """A store has the same content hash in any order and when it is hashed in ranges."""
    pairs = list(PAIRS.items())
    whole = of_pairs(iter(pairs))
    assert whole.keys == len(pairs)
    assert whole == of_pairs(reversed(pairs)) == of_pairs(iter(pairs[:700])) + of_pairs(iter(pairs[700:]))
    assert len(whole.hash) == 32


@pytest.mark.parametrize(
    "other",
    [
        {**PAIRS, b"one more": b""},
        {key: value for key, value in PAIRS.items() if key != b"key-7"},
        {**PAIRS, b"key-7": b"another"},
        {**PAIRS, b"key-7": PAIRS[b"key-8"], b"key-8": PAIRS[b"key-7"]},
    ],
    ids=["an extra key", "a missing key", "another value", "two values swapped"],
)
def test_every_difference_changes_the_hash(other: dict[bytes, bytes]) -> None:
    """Even a difference that keeps the number of keys and all bytes changes the hash."""
    assert of_pairs(iter(other.items())) != of_pairs(iter(PAIRS.items()))


def test_where_a_key_ends_counts() -> None:
    """The same bytes, split differently into key and value, are another pair."""
    assert of_pairs(iter([(b"ab", b"c")])) != of_pairs(iter([(b"a", b"bc")]))


@pytest.mark.parametrize("most", [10, 400_000], ids=["parts that are split again", "parts in memory"])
def test_the_newest_record_of_each_key_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The content of a changelog with repeated keys and deletes is that of the state that results from it."""
    monkeypatch.setattr(digest, "MOST_KEYS", most)
    for seed in range(3):
        changes = records(seed)
        (tmp_path / str(seed)).mkdir()
        assert hashed(changes, tmp_path / str(seed)) == of_pairs(iter(state(changes).items()))


def test_an_empty_changelog_is_an_empty_store(tmp_path: Path) -> None:
    """A changelog without records, or with nothing left after its deletes, has the content of an empty store."""
    assert hashed([], tmp_path, 1) == Content()
    (tmp_path / "deletes").mkdir()
    assert hashed([(b"a", b"1"), (b"a", None), (b"b", None)], tmp_path / "deletes", 1) == Content()


def test_the_keys_that_differ_are_listed_in_order() -> None:
    """The list includes keys that one side lacks and keys whose values differ, even if the sizes are equal."""
    left = {b"a": b"1", b"b": b"2", b"d": b"4", b"e": b"5"}
    right = {b"a": b"1", b"b": b"22", b"c": b"3", b"e": b"6"}
    assert list(differing([iter(left.items()), iter(right.items())])) == [
        (b"b", (b"2", b"22")),
        (b"c", (None, b"3")),
        (b"d", (b"4", None)),
        (b"e", (b"5", b"6")),
    ]
    assert list(differing([iter(left.items()), iter(()), iter(left.items())])) == [
        (key, (value, None, value)) for key, value in left.items()
    ]
