"""errors: one class hierarchy, whose kinds, places and hints survive every way out of a process."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from statemgr import errors
from statemgr.errors import CorruptBlob, StatemgrError, UnavailableError, from_json

KINDS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StatemgrError)),
    key=lambda kind: kind.__name__,
)


def example(kind: type[StatemgrError]) -> StatemgrError:
    """Return an error of the kind with everything set."""
    return kind("it broke", hint="fix it", blob="j/1/x", partition=3, offset=None)


@pytest.mark.parametrize("kind", KINDS)
def test_error_survives_pickle_and_copy(kind: type[StatemgrError]) -> None:
    """Kind, message, hint and place are the same after pickling (multiprocessing, Spark) and copying."""
    error = example(kind)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):  # noqa: S301
        assert type(again) is kind
        assert (again.message, again.hint, again.where) == (error.message, error.hint, error.where)
        assert str(again) == str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_error_survives_json(kind: type[StatemgrError]) -> None:
    """Kind, message, hint and place are the same after one line of JSON."""
    error = example(kind)
    text = error.to_json()
    assert "\n" not in text
    again = from_json(text)
    assert type(again) is kind
    assert (again.message, again.hint, again.where) == (error.message, error.hint, error.where)


def test_text_says_what_where_and_hint() -> None:
    """The text of an error has the message, every known place and the hint."""
    error = example(CorruptBlob)
    assert str(error) == "it broke [blob=j/1/x, partition=3] Hint: fix it"
    assert str(CorruptBlob("it broke")) == "it broke"


def test_outer_caller_adds_places_but_overwrites_none() -> None:
    """The innermost place counts. A caller only adds what is missing."""
    error = CorruptBlob("it broke", store="inner").with_where(store="outer", task="Partition 0", job=None)
    assert error.where == {"store": "inner", "task": "Partition 0"}


def test_json_of_an_unknown_kind_is_the_root_class() -> None:
    """An unknown kind, such as one from newer software, is read as a StatemgrError."""
    again = from_json(json.dumps({"error": "FromTheFuture", "message": "m", "hint": None, "where": {}}))
    assert type(again) is StatemgrError
    assert again.message == "m"


def test_json_keeps_odd_places_as_text() -> None:
    """A place that JSON cannot express becomes text instead of a second error."""
    again = from_json(UnavailableError("m", path=b"\xff").to_json())
    assert again.where == {"path": "b'\\xff'"}


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.ConfigError, 2),
        (errors.PrerequisiteMissing, 2),
        (errors.UnavailableError, 3),
        (errors.AccessDenied, 3),
        (errors.OutcomeUnknownError, 3),
        (errors.CorruptRecord, 4),
        (errors.MissingState, 4),
        (errors.TopicMisconfigured, 1),
    ],
)
def test_exit_statuses(kind: type[StatemgrError], status: int) -> None:
    """Exit status 1 means a check found something, 2 wrong use, 3 not reachable, 4 missing or corrupt state."""
    assert kind.exit_status == status


def test_docstring_draws_every_kind() -> None:
    """The tree in the module's docstring has every kind."""
    assert errors.__doc__ is not None
    assert [kind.__name__ for kind in KINDS if kind.__name__ not in errors.__doc__] == []
