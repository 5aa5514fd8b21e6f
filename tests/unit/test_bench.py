"""What the measurements are made of: lines and verdicts, rounds and medians, the table of cases, how it is shown."""

from __future__ import annotations

import json
import math

import pytest

from statemgr.bench import records, registry, render
from statemgr.bench.measure import interleaved, percentile
from statemgr.bench.result import NOT_AVAILABLE, Target, alone, compared
from statemgr.bench.session import SMALL, Plan, Session

_FIELDS = ["case", "value", "unit", "reference", "reference_value", "ratio", "target", "reached"]


@pytest.mark.parametrize(
    ("target", "ours", "theirs", "reached", "miss"),
    [
        (Target("at least", 0.8), 90.0, 100.0, True, 0.0),
        (Target("at least", 0.8), 60.0, 100.0, False, 0.25),
        (Target("at most", 1.2), 120.0, 100.0, True, 0.0),
        (Target("at most", 0.5), 100.0, 100.0, False, 1.0),
    ],
)
def test_a_line_compares_with_its_reference(
    target: Target, ours: float, theirs: float, reached: bool, miss: float
) -> None:
    """The ratio is value over reference, the verdict is the target's, the miss a share of the bound."""
    line = compared("restore-file", ours, "MB/s", "a plain copy", theirs, target)
    assert line.result.ratio == ours / theirs
    assert line.result.reached is reached
    assert line.miss == pytest.approx(miss)


def test_a_reference_that_is_not_there_gives_no_verdict() -> None:
    """The line says so, keeps its target, and is neither reached nor missed."""
    line = compared("restore-s3", 5.0, "MB/s", "Samza", None, Target("at least", 2))
    assert line.result.reached is None
    assert NOT_AVAILABLE in line.result.reference
    assert (line.result.target, render.verdict(line)) == ("≥ 2×", "–")


def test_a_line_without_a_reference_is_bound_by_its_value() -> None:
    """Peak memory has a limit, and nothing to compare with."""
    limit = Target("at most", 256, of="value")
    assert alone("peak-memory", 200.0, "MB", "a restore", limit).result.reached is True
    assert alone("peak-memory", 300.0, "MB", "a restore", limit).result.reached is False


def test_json_has_exactly_the_fields_of_the_contract() -> None:
    """In order; numbers short; what JSON cannot say is null."""
    line = compared("commit-idle", 1.23456789, "s", "none", 0.0, Target("at most", 0.01))
    fields = line.result.to_dict()
    assert list(fields) == _FIELDS
    assert fields["value"] == 1.235
    assert (line.result.ratio, fields["ratio"]) == (math.inf, None)
    json.dumps(fields, allow_nan=False)


def test_variants_are_measured_in_turn_and_each_begins_once() -> None:
    """Round after round, with another first each time; what warms up is not counted."""
    calls: list[tuple[str, int]] = []

    def variant(name: str) -> float:
        calls.append((name, len(calls)))
        return float(len(calls))

    found = interleaved({"a": lambda n: variant("a"), "b": lambda n: variant("b")}, 3, warm_up=1)
    assert [name for name, _ in calls] == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert [sample["seconds"] for sample in found["a"].samples] == [3.0, 6.0, 7.0]
    assert found["a"].median() == 6.0


def test_several_numbers_of_one_measurement() -> None:
    """A variant may measure more than its time; medians are taken by name."""
    found = interleaved({"a": lambda n: {"seconds": 1.0, "peak": float(n)}}, 3)
    assert (found["a"].median("peak"), found["a"].largest("peak")) == (1.0, 2.0)


@pytest.mark.parametrize(("share", "expected"), [(0, 1.0), (0.5, 2.5), (1, 4.0), (0.75, 3.25)])
def test_percentiles_lie_between_neighbours(share: float, expected: float) -> None:
    """As the usual definition has it."""
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_a_percentile_of_nothing_is_refused() -> None:
    """Rather than a number that means nothing."""
    with pytest.raises(ValueError, match="needs values"):
        percentile([], 0.5)


def test_every_case_of_the_table_has_a_function() -> None:
    """And it says in a sentence what it measures."""
    for name, (_, must) in registry.TABLE.items():
        found = registry.find(name)
        assert (found.name, found.must) == (name, must)
        assert found.measure.__doc__


def test_records_are_the_same_in_every_run() -> None:
    """Keys of 16 and values of 100 bytes, alike whatever the batches, different by number and by seed."""
    whole = [pair for batch in records.batches(20_000) for pair in batch]
    later = [pair for batch in records.batches(10_000, start=10_000) for pair in batch]
    assert whole[10_000:] == later
    assert len({key for key, _ in whole}) == 20_000
    assert {(len(key), len(value)) for key, value in whole} == {(16, 100)}
    assert next(records.batches(10, seed=1))[0][1] != whole[0][1]


def test_updates_are_of_existing_keys_and_new_values() -> None:
    """So many different ones; fewer where there are no more."""
    changed = records.updates(50, of=100, seed=3)
    assert len({key for key, _ in changed}) == 50
    assert {key for key, _ in changed} <= {records.key(number) for number in range(100)}
    assert len(records.updates(50, of=20, seed=3)) == 20


def test_the_summary_names_what_was_missed() -> None:
    """What must be reached, what else was missed, and what by more than is allowed."""
    target = Target("at most", 1)
    lines = [
        compared("commit-idle", 2.0, "s", "r", 1.0, target),
        compared("store-calls", 1.5, "s", "r", 1.0, target),
        compared("store-calls", 1.1, "s", "r", 1.0, target),
        compared("backup-s3", 1.0, "s", "r", 1.0, target),
    ]
    text = render.summary(lines, {"commit-idle"})
    assert "were not: commit-idle" in text
    assert "1 of the others missed (allowed: 3): store-calls" in text
    assert "store-calls by more than 25%" in text
    assert render.missed_cases(lines) == {"commit-idle": 1.0, "store-calls": 0.5}


def test_markdown_has_a_row_for_each_line() -> None:
    """With every column of the table."""
    text = render.markdown([alone("peak-memory", 1234.5, "MB", "a | restore")])
    header, rule, row = text.splitlines()
    assert header.count("|") == rule.count("|") == len(render.HEADERS) + 1
    assert "1,234" in row


def test_sizes_are_scaled_and_never_above_the_table(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Small runs measure less; nothing measures more than the table says."""
    with Session(Plan(work=tmp_path, scale=SMALL)) as session:
        assert session.bytes(2**30) == 2**21
        assert session.count(1000, least=100) == 100
        assert session.count(5, least=100) == 5
    with Session(Plan(work=tmp_path, scale=3.0)) as session:
        assert (session.bytes(2**30), session.count(1000), session.full) == (2**30, 1000, True)
    assert list(tmp_path.iterdir()) == [], "a run leaves nothing behind"
