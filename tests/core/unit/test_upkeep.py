"""Which blobs have their turn in a look, and what becomes of those that cannot be checked."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from statemgr.config import JobConfig
from statemgr.engine.coordinator import LOOK_S, UpkeepThread
from statemgr.errors import AccessDenied, MissingBlob
from statemgr.flows import upkeep
from statemgr.flows.upkeep import Turn, Upkeep, look, order_check, order_prefix
from statemgr.ids import IdSource
from statemgr.model.checkpoint import BlobMarker, BlobRef
from statemgr.ports import list_blobs
from statemgr.testing.memory_servers import MemoryServers
from statemgr.wiring import open_services
from tests.blob_faults import ManualClock

CONFIG = {"job.name": "orders"}
NAMES = [f"orders/1/Partition_0/totals/{number}/index" for number in range(500)]
TASKS = [f"Partition {number}" for number in range(3)]
DAY_S = 24 * 3600.0


def turns(task: str, edges: list[float]) -> list[int]:
    """Return how often each blob has its turn, in looks between these times."""
    found = [of for turn in map(Turn, edges, edges[1:]) if (of := turn.of(task)) is not None]
    return [sum(of(name) for of in found) for name in NAMES]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("begin_s", [0.0, 12_345.6, DAY_S - 1])
def test_each_blob_has_one_turn_in_a_day(task: str, begin_s: float) -> None:
    """The looks of a day, whenever they begin, and however long they take, include each blob once."""
    edges = [begin_s + DAY_S * number / 1440 + (number % 7 if 0 < number < 1440 else 0) for number in range(1441)]
    assert set(turns(task, edges)) == {1}


@pytest.mark.parametrize("task", TASKS)
def test_blobs_are_listed_once_an_hour(task: str) -> None:
    """In the other looks nobody reads an index. In none, all blobs have their turn."""
    found = [Turn(at, at + 60.0).of(task) for at in range(0, 3600, 60)]
    (only,) = filter(None, found)
    assert sum(map(only, NAMES)) < len(NAMES) / 10


def test_after_a_day_without_a_look_each_has_its_turn() -> None:
    """A process that was suspended for days asks for everything once."""
    assert set(turns(TASKS[0], [1000.0, 1000.0 + 2.5 * DAY_S])) == {1}


def test_an_order_comes_before_its_turn_and_is_read_whole() -> None:
    """A blob that an order names is read, however large it is."""
    turn = Turn(0.0, 0.0, frozenset({"large"}))
    named = turn.of(TASKS[0])
    assert named is not None
    assert named("large")
    assert not any(map(named, NAMES))
    assert turn.reads(BlobRef("large", 1 << 40, b""), 1 << 40)
    assert not turn.reads(BlobRef("other", 1 << 40, b""), 1 << 40)


class Owner:
    """Two tasks that ask for their blobs. ``refused``: a blob of the first one that cannot be checked."""

    def __init__(self, refused: str | None) -> None:
        self.clean_ups = dict.fromkeys(TASKS[:2], SimpleNamespace(is_unfinished=False))
        self.owner = SimpleNamespace(of_job=True)
        self.asked: Counter[str] = Counter()
        self._refused = refused

    def look(self, task: str, turn: Turn) -> None:
        has_turn = turn.of(task)
        due = [name for name in NAMES if has_turn is not None and has_turn(name)]
        self.asked.update(f"{task}/{name}" for name in due)
        if task == TASKS[0] and self._refused in due:
            raise AccessDenied("no right to read", blob=self._refused)


def looked_at(refused: str | None) -> Counter[str]:
    """Return how often each blob was asked for in two days."""
    clock, owner = ManualClock(), Owner(refused)
    services = open_services(JobConfig.from_mapping(CONFIG), clock, IdSource(clock.time_ns, str))
    topics: Any = SimpleNamespace(look=lambda: None)
    thread = UpkeepThread(services, topics, lambda: [owner])  # type: ignore[list-item]
    for _ in range(int(2 * DAY_S / LOOK_S)):
        clock.now += LOOK_S
        thread.look()
    services.close()
    return owner.asked


def test_a_blob_that_cannot_be_checked_costs_few_requests() -> None:
    """Its task tries it for an hour, and again in its next turn. Other tasks ask for theirs as often as ever."""
    faultless, found = looked_at(None), looked_at(NAMES[7])
    of_other = [f"{TASKS[1]}/{name}" for name in NAMES]
    assert {name: found[name] for name in of_other} == {name: faultless[name] for name in of_other}
    assert set(faultless.values()) == {2}
    assert found[f"{TASKS[0]}/{NAMES[7]}"] > 100
    assert all(found[name] >= 2 for name in faultless)
    assert sum(found[f"{TASKS[0]}/{name}"] for name in NAMES) < 12 * len(NAMES)


def test_damage_is_found_next_to_a_blob_that_cannot_be_checked() -> None:
    """The answer for one blob does not hide what is known of the others."""
    refs = [BlobRef(name, 1, b"") for name in ("refused", "missing")]
    failed = {refs[0]: AccessDenied("no right to read"), refs[1]: MissingBlob("it does not exist")}
    services: Any = SimpleNamespace(
        config=SimpleNamespace(stores={"totals": SimpleNamespace(backup_factories=["blob-store"])}),
        identity=lambda *of: of,
        backup_manager=lambda _: SimpleNamespace(needed=lambda *_: [(ref, 1) for ref in failed]),
        transfer=lambda: SimpleNamespace(for_each=lambda *_: failed, absent=lambda _: {}),
    )
    checkpoint: Any = SimpleNamespace(marker=lambda *_: BlobMarker(inline=b""))
    turn = Turn(0.0, 0.0, frozenset(ref.blob_id for ref in refs))
    assert look(services, TASKS[0], lambda: checkpoint, turn) == {
        ("blob-store", "totals"): "missing: it does not exist"
    }
    del failed[refs[1]]
    with pytest.raises(AccessDenied):
        look(services, TASKS[0], lambda: checkpoint, turn)


def test_an_order_of_many_blobs_is_read(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The names after 1 MiB are in further orders. If there are too many orders, the log says so."""
    services = servers.services(servers.on_disk(servers.config, "one"))
    names = {
        f"orders/1/Partition_0/totals/1704067200000-142d451c86b7487f/{number:06d}.sst.0" for number in range(30_000)
    }
    order_check(services, names)
    orders = list(list_blobs(services.blobs(), order_prefix(services)))
    assert len(orders) == 3
    assert Upkeep(services).turn().ordered == names
    monkeypatch.setattr(upkeep, "_MOST_ORDERS", 2)
    assert Upkeep(services).turn().ordered < names
    assert "ignored 1 order to check blobs" in caplog.text
    services.close()
