"""Names that the stores of an old job get."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statemgr.config import JobConfig
from statemgr.errors import InvalidError
from statemgr.operations.adopt.names import check_given, named, our_name


@given(st.text("abcXYZ019._-", min_size=1, max_size=249))
def test_every_name_in_a_topic_gets_one_that_a_key_can_have(old: str) -> None:
    """The name of a store in the name of a topic becomes one that a configuration can have, and then stays as it is."""
    name = our_name(old)
    JobConfig.from_mapping({"job.name": "job", f"stores.{name}.type": "memory", f"stores.{name}.changelog.topic": "t"})
    assert our_name(name) == name


def test_names_that_a_key_can_have_stay() -> None:
    """Only other characters, other beginnings, reserved names and what is too long change."""
    for old in ("totals", "x_", "a-b", "KSTREAM-AGGREGATE-STATE-STORE-0000000003"):
        assert our_name(old) == old
    changed = {"a.b": "a_b", "-x": "store-x", "_x": "store_x", "default": "store_default", "v" * 150: "v" * 128}
    assert {old: our_name(old) for old in changed} == changed


def test_two_old_names_never_become_one() -> None:
    """The error names both, and the option that gives them other names."""
    assert named([("a.b", "t1"), ("c", "t2")]) == ({"a_b": "t1", "c": "t2"}, {"a_b": "a.b", "c": "c"})
    for one, other in (("a.b", "a_b"), ("totals", "totals"), ("v" * 129, "v" * 130)):
        with pytest.raises(InvalidError, match="would both be called") as refused:
            named([(one, "first"), (other, "second")])
        assert f"'{one}' (first) and '{other}' (second)" in str(refused.value)
        assert f"--changelog {our_name(one)}=first --changelog STORE=second" in str(refused.value.hint)


def test_a_name_that_the_user_gives_must_be_one() -> None:
    """What a user has chosen is not changed."""
    check_given({"a_b": "topic"})
    with pytest.raises(InvalidError, match="cannot be called") as refused:
        check_given({"a.b": "topic"})
    assert "--changelog a_b=topic" in str(refused.value.hint)
