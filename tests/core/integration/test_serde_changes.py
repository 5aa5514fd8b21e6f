"""A store's serdes are part of every checkpoint, and a change needs a permission (FAULT 52)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from statemgr import JobConfig, StateManager
from statemgr.errors import PermissionNeeded
from statemgr.serdes import Serde, SerdeLike
from tests.commits import TASK, current
from tests.jobs import job_mapping, with_changes
from tests.servers import KafkaServer

CUSTOMER = Serde(lambda value: f"c{value}".encode(), lambda data: int(data[1:]), "customer")
CUSTOMER_2 = Serde(lambda value: f"c{value:010}".encode(), lambda data: int(data[1:]), "customer", 2)
UNNAMED = (lambda value: json.dumps(value).encode(), json.loads)


def job(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """Create a job with one task. Its store has the default serdes unless others are given."""
    mapping = job_mapping(kafka, directory, **more)  # type: ignore[arg-type]
    left = {key: value for key, value in mapping.items() if (key, value) != ("stores.totals.value.serde", "bytes")}
    return JobConfig.from_mapping(left | {"stores.totals.type": "rocksdb"})


def recorded(config: JobConfig) -> tuple[str, str]:
    """Return the labels in the current checkpoint."""
    record = current(config)
    assert record is not None
    return record.current.serdes["totals"]


def put(config: JobConfig, key: Any, value: Any, *serdes: SerdeLike, **permissions: bool) -> Any:
    """Open, write with these serdes and commit. Returns: the earlier value of the key."""
    with StateManager(config) as manager, manager.open_task(TASK, **permissions) as task:
        store = task.store("totals", *serdes)
        before = store.get(key)
        store.put(key, value)
        task.commit({"orders-0": 1})
        return before


@pytest.mark.parametrize(("which", "was", "now"), [("key", "string", "json"), ("value", "json", "msgpack")])
def test_a_changed_serde_is_refused_at_the_opening(
    kafka: KafkaServer, tmp_path: Path, which: str, was: str, now: str
) -> None:
    """FAULT 52: with a changed serde, every customer would start at zero. A task and the complete job refuse to open,
    before anything changes."""
    config = job(kafka, tmp_path, stores__totals__key__serde="string", stores__totals__value__serde="json")
    assert put(config, "customer", 1) is None
    assert recorded(config) == ("string", "json")
    changed = with_changes(config, **{f"stores__totals__{which}__serde": now})
    with StateManager(changed) as manager:
        for opening in (lambda: manager.open_task(TASK), manager.acquire):
            with pytest.raises(PermissionNeeded, match=f"{which}s .*'{was}'.*'{now}'") as caught:
                opening()
            assert caught.value.where["store"] == "totals"
            assert "allow_serde_change=True" in str(caught.value.hint)
    assert put(config, "customer", 2) == 1
    # the permission is for one opening, which commits although no input follows; then the store has the new serde
    with StateManager(changed) as manager, manager.open_task(TASK, allow_serde_change=True):
        pass
    assert recorded(config) == ("string", now) if which == "value" else (now, "json")
    with StateManager(config) as manager, pytest.raises(PermissionNeeded):
        manager.open_task(TASK)
    with StateManager(changed) as manager, manager.open_task(TASK):
        pass


def test_a_serde_that_the_application_passes(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 52: a serde's name and version count. Another serde, or none, is refused before the store can be used."""
    config = job(kafka, tmp_path)
    assert put(config, 7, b"1", CUSTOMER) is None
    assert recorded(config) == ("customer", "bytes")
    others: tuple[SerdeLike | None, ...] = (CUSTOMER_2, UNNAMED, "string", None)
    for number, other in enumerate(others, 2):
        with StateManager(config) as manager, manager.open_task(TASK) as task:
            with pytest.raises(PermissionNeeded, match="'customer'"):
                task.store("totals", other)
            task.commit({"orders-0": number})  # a serde that was not used changes nothing
        assert recorded(config) == ("customer", "bytes")
    assert put(config, 7, b"2", CUSTOMER) == b"1"
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        assert dict(task.store("totals", "bytes").range()) == {b"c7": b"2"}  # bytes are a view of anything
        task.commit({"orders-0": 9})
    assert recorded(config) == ("customer", "bytes")
    assert put(config, 7, b"3", CUSTOMER_2, allow_serde_change=True) is None
    assert recorded(config) == ("customer v2", "bytes")


def test_a_pair_without_a_name(kafka: KafkaServer, tmp_path: Path) -> None:
    """Two functions without a name count as one serde from one run to the next."""
    config = job(kafka, tmp_path)
    make: Callable[..., Any] = lambda: put(config, [1], b"1", UNNAMED)  # noqa: E731
    assert make() is None
    assert recorded(config) == ("unnamed", "bytes")
    assert make() == b"1"
