"""ids: checkpoint IDs, attempt IDs and task names."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statemgr.errors import InvalidError
from statemgr.ids import NAME, CheckpointId, IdSource, task_index, task_name, task_path


def test_checkpoint_id_is_millis_and_nanos() -> None:
    """The text is the epoch milliseconds and the last six digits of the nano clock, padded."""
    assert str(CheckpointId.at(1_700_000_000_123_000_456)) == "1700000000123-000456"


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1))
def test_checkpoint_id_round_trips(time_ns: int) -> None:
    """An ID can be parsed from its own text, and IDs have the same order as their times."""
    checkpoint_id = CheckpointId.at(time_ns)
    assert CheckpointId.parse(str(checkpoint_id)) == checkpoint_id
    assert CheckpointId.at(time_ns + 1) > checkpoint_id


@pytest.mark.parametrize("text", ["", "1", "1-2", "-000001", "1-0000001", "a-000001", "1-000001\n", "1-000001 "])
def test_other_text_is_no_checkpoint_id(text: str) -> None:
    """Any other text is refused with an example of a checkpoint ID."""
    with pytest.raises(InvalidError, match="looks like"):
        CheckpointId.parse(text)


@pytest.mark.parametrize("index", [0, 1, 10, 999_999])
def test_task_names_round_trip(index: int) -> None:
    """Task i is called 'Partition i', and its path has no space."""
    assert task_name(index) == f"Partition {index}"
    assert task_index(task_name(index)) == index
    assert task_path(task_name(index)) == f"Partition_{index}"


@pytest.mark.parametrize(
    "task", ["", "Partition", "Partition -1", "Partition 01", "Partition 1/..", "partition 1", "Partition 1\n"]
)
def test_other_text_is_no_task(task: str) -> None:
    """A name that is not a task's never becomes a path."""
    with pytest.raises(InvalidError):
        task_path(task)


def test_attempt_ids_are_unique_and_sort_by_time() -> None:
    """Two attempts at the same time differ in their token, and a later attempt sorts after an earlier one."""
    tokens = (f"{n:032x}" for n in count(1 << 64))
    times = iter([1_700_000_000_000_000_000, 1_700_000_000_000_000_000, 1_700_000_000_001_000_000])
    ids = IdSource(lambda: next(times), lambda: next(tokens)[::-1])
    first, second, third = ids.attempt_id(), ids.attempt_id(), ids.attempt_id()
    assert first != second
    assert max(first, second) < third
    assert NAME.match(first)


@pytest.mark.parametrize("name", ["../x", "/x", ".x", "a/b", "", "a\0", "a\n", "a" * 129, "a b"])
def test_unsafe_names_are_no_names(name: str) -> None:
    """Names of jobs and stores are safe as file names and object keys."""
    assert not NAME.match(name)
