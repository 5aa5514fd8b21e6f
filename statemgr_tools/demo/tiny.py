"""``statemgr demo --tiny``: a service that is killed in each stage of a migration, in seconds and in one process.

Broker and blob store are in memory (:class:`statemgr.testing.JobTester`). Commits, restores and RocksDB are those of
production. A kill ends the service's threads without a commit and deletes its disk.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from statemgr.engine.task import Task
from statemgr.ids import task_name
from statemgr.testing import JobTester

if TYPE_CHECKING:
    from rich.console import Console

_CHANGELOG, _BLOBS = "kafka-changelog", "blob-store"
_CUSTOMERS = [f"customer-{number:03}" for number in range(200)]
_TASKS = 4
#: What each step of a migration sets: the backup list and the restore list.
_STAGES = (
    ([_CHANGELOG], [_CHANGELOG]),
    ([_CHANGELOG, _BLOBS], [_CHANGELOG]),
    ([_CHANGELOG, _BLOBS], [_BLOBS, _CHANGELOG]),
    ([_BLOBS], [_BLOBS]),
    ([_CHANGELOG, _BLOBS], [_BLOBS, _CHANGELOG]),
)
#: Orders of a stage: committed before the kill, processed but lost by it, and sent while the service is down.
_COMMITTED, _LOST, _WAITING = 1800, 100, 100


@dataclass(frozen=True, slots=True)
class Survived:
    """A kill and what came back. ``seconds`` is the time until all tasks were restored and had read on.

    ``orders`` is the number of orders so far, ``wrong`` the customers whose total differs from the recount.
    """

    stage: int
    backup: tuple[str, ...]
    restored_from: str
    seconds: float
    orders: int
    wrong: tuple[str, ...]


def tiny(seed: int, console: Console) -> list[Survived]:
    """Run the service through all stages and one step back, with a kill in each. Prints a line for each.

    Raises: StatemgrError.
    """
    chance, recount, orders = random.Random(seed), Counter[str](), 0
    console.print(
        f"A service adds up the orders of 200 customers in 4 tasks (seed {seed}). "
        "It moves from changelogs to blobs, and a stage back.\n"
        "In each stage it is killed with 100 orders that are not committed yet, and its disk is deleted.\n",
        soft_wrap=True,
    )
    found = []
    with JobTester(_config(), _add_up) as tester:
        for backup, restore in _STAGES:
            tester.stop()
            _send(tester, chance, recount, _COMMITTED)
            tester.restore(settings={"task.backup.factories": backup, "task.restore.factories": restore})
            tester.commit()
            _send(tester, chance, recount, _LOST)
            tester.crash(lose_disk=True)
            _send(tester, chance, recount, _WAITING)
            started = time.monotonic()
            tester.restore(restore[0])
            seconds = time.monotonic() - started
            orders += _COMMITTED + _LOST + _WAITING
            stage = _STAGES.index((backup, restore)) + 1
            found.append(Survived(stage, tuple(backup), restore[0], seconds, orders, _wrong(tester, recount)))
            _print(console, found[-1])
    return found


def to_json(found: list[Survived], seed: int) -> dict[str, Any]:
    """The same for machines."""
    equal = not any(one.wrong for one in found)
    return {"seed": seed, "equal": equal, "kills": [asdict(one) for one in found]}


def _config() -> dict[str, object]:
    backup, restore = _STAGES[0]
    return {
        "job.name": "orders",
        "job.tasks": _TASKS,
        "task.inputs": ["orders"],
        "task.backup.factories": backup,
        "task.restore.factories": restore,
        "stores.totals.key.serde": "string",
        "stores.totals.value.serde": "json",
    }


def _add_up(task: Task, message: Any) -> None:
    totals, customer, order = task.store("totals"), message.key().decode(), json.loads(message.value())
    totals.put(customer, (totals.get(customer) or 0) + order["amount"])


def _send(tester: JobTester, chance: random.Random, recount: Counter[str], count: int) -> None:
    for _ in range(count):
        customer, amount = chance.choice(_CUSTOMERS), chance.randint(1, 100)
        tester.send("orders", customer, json.dumps({"amount": amount}))
        recount[customer] += amount


def _wrong(tester: JobTester, recount: Counter[str]) -> tuple[str, ...]:
    stores = [tester.store("totals", task=task_name(number)) for number in range(_TASKS)]
    totals = {customer: total for store in stores for customer, total in store.range()}
    return tuple(sorted(name for name in totals | recount if totals.get(name) != recount.get(name)))


def _print(console: Console, one: Survived) -> None:
    text = f"[red]{len(one.wrong)} WRONG[/]" if one.wrong else "[green]all equal[/]"
    console.print(
        f"stage {one.stage}  backup {' + '.join(one.backup):<28} killed, restored from {one.restored_from:<15} "
        f"in {one.seconds:.2f} s  {one.orders:>6,} orders, totals {text}",
        highlight=False,
        soft_wrap=True,
    )
