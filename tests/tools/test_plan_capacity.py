"""``statemgr plan-capacity``: its formulas, compared with real commits, and its command line."""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from statemgr.blobs.body import body_size
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.cli.main import cli
from statemgr.config.policies import SnapshotInterval
from statemgr.engine import coordinator
from statemgr.errors import InvalidError
from statemgr.flows.committing.background_snapshots import share_of_interval
from statemgr.ids import task_name
from statemgr.kafka.clients import QUEUE_BYTES
from statemgr.ports import Body, StoreIdentity
from statemgr.testing import JobTester
from statemgr_tools.sizing import resources
from statemgr_tools.sizing.commits import walk_chain
from statemgr_tools.sizing.prices import default_table, load_prices
from statemgr_tools.sizing.resources import Resources
from statemgr_tools.sizing.workload import Workload
from tests.docs.blocks import blocks

ROOT = Path(__file__).parents[2]
#: How far a formula may be from the counted value.
TOLERANCE = 0.25
KEY_BYTES, COMMIT_S, SNAPSHOTS = 16, 10, 4


class Counted:
    """Counts the requests and bytes of all blob stores in memory, by kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: Counter[str] = Counter()
        self._lock = threading.Lock()
        put = MemoryBlobStore.put

        def counted_put(store: MemoryBlobStore, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
            self._add("put", 1)
            self._add("bytes", body_size(body))
            put(store, blob_id, body, ttl_days=ttl_days)

        monkeypatch.setattr(MemoryBlobStore, "put", counted_put)
        for kind in ("get", "remove_ttl", "delete_many"):
            monkeypatch.setattr(MemoryBlobStore, kind, self._counting(kind, getattr(MemoryBlobStore, kind)))

    def _counting(self, kind: str, function: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            self._add(kind, 1)
            return function(*arguments, **named)

        return counted

    def _add(self, kind: str, number: int) -> None:
        with self._lock:
            self.of[kind] += number


def _close(formula: float, counted: float) -> bool:
    return abs(formula - counted) <= TOLERANCE * counted


@pytest.mark.parametrize(
    ("tasks", "stores", "changes", "keys", "value_bytes"),
    [
        (1, 1, 10, 2_000, 100),
        (1, 1, 400, 6_000, 100),
        pytest.param(1, 1, 2_100, 12_000, 30, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_formulas_agree_with_commits(
    tasks: int, stores: int, changes: int, keys: int, value_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formulas predict the requests and bytes of commits and snapshots, of a restore and of a record."""
    counted = Counted(monkeypatch)
    generator = random.Random(1)
    keys_of_store = [generator.randbytes(KEY_BYTES) for _ in range(keys)]
    names = [f"store{number}" for number in range(stores)]
    owners = [StoreIdentity("planned", "1", task_name(task), name) for task in range(tasks) for name in names]
    planned = Workload(
        tasks=tasks,
        stores=stores,
        keys=keys * len(owners),
        key_bytes=KEY_BYTES,
        value_bytes=value_bytes,
        changes_per_s=changes * len(owners) / COMMIT_S,
        commit_s=COMMIT_S,
        interval=SnapshotInterval(commits=10),
        share=sum(map(share_of_interval, owners)) / len(owners),
    )
    plan = Resources(planned)
    commits = plan.commits.commits_between * SNAPSHOTS

    def process(task: Any, message: Any) -> None:
        for name in names:
            chosen = generator.sample(keys_of_store, int(message.value()))
            task.store(name).put_many([(key, generator.randbytes(value_bytes)) for key in chosen])

    config = {
        "job.name": "planned",
        "job.tasks": tasks,
        "task.inputs": "numbers",
        "task.backup.factories": "blob-store",
        "task.commit.ms": COMMIT_S * 1000,
        "task.commit.snapshot.interval": "10 commits",
        **{f"stores.{name}.type": "rocksdb" for name in names},
    }
    with JobTester(config, process) as job:
        _commit(job, keys, 1)
        _commit(job, changes, plan.commits.commits_between + 1)  # until the first snapshot is no longer retained
        counted.of.clear()
        _commit(job, changes, commits)
        seen = dict(counted.of)
        records = [len(record.value) for record in job.output(job.config.checkpoint_topic) if record.value]
        _commit(job, changes, plan.commits.commits_between // 2 + 1)  # the first one builds on the last snapshot
        counted.of.clear()
        job.crash(lose_disk=True)
        job.restore("blob-store")
        gets = counted.of["get"] / tasks

    rates, seconds = plan.commits, commits * COMMIT_S
    # the formulas hold for one task: how many tasks share a blob depends on their speed
    assert _close(rates.puts_per_s * seconds, seen["put"]), (rates.puts_per_s * seconds, seen)
    assert _close(rates.untags_per_s * seconds, seen["remove_ttl"]), (rates.untags_per_s * seconds, seen)
    assert _close(rates.uploaded_per_s * seconds, seen["bytes"]), (rates.uploaded_per_s * seconds, seen)
    assert _close(rates.deletes_per_s * seconds, seen["delete_many"]), (rates.deletes_per_s * seconds, seen)
    assert _close(plan.checkpoint_record_bytes, sum(records) / len(records))
    # in each store, two files more or fewer may wait for compaction, with two requests each
    assert abs(plan.restore_gets - gets) <= TOLERANCE * gets + 4 * stores, (plan.restore_gets, gets)


def _commit(job: JobTester, changes: int, commits: int) -> None:
    """Commit several times. Each commit waits for background snapshots, so that the next one builds on them."""
    for _ in range(commits):
        for partition in range(job.config.tasks):
            job.send("numbers", value=str(changes).encode(), partition=partition)
        job.advance(seconds=COMMIT_S)
        for task in job._members[0].manager.open.values():
            assert task._coordinator.snapshots.worker.wait(30)


# --- formulas alone ---------------------------------------------------------------------------------------------------


def test_small_commits_need_few_blobs() -> None:
    """A chain stays in the record until it is too large. Then one blob takes all its segments."""
    assert walk_chain(40, 100, inline=True, limit=8192).blobs == 0
    few = walk_chain(50, 1200, inline=True, limit=8192)
    assert 50 / 7 <= few.blobs < 25
    assert walk_chain(50, 3000, inline=False, limit=8192).blobs == 50


@pytest.mark.parametrize(("interval", "column"), [("50 commits,256 MiB,10 min", 2), ("1 commit", 5)])
def test_uploads_agree_with_the_benchmark(interval: str, column: int) -> None:
    """200 commits of 10,000 updates on 70.3 MiB upload the bytes of ``commit-bytes-200`` in docs/performance.md, and
    docs/sizing.md has both numbers."""
    table, page = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("performance.md", "sizing.md"))
    (line,) = (line for line in table.splitlines() if line.startswith("| commit-bytes-200 |"))
    measured = float(line.split("|")[column].replace(",", "")) * 1e6
    planned = Workload(
        tasks=1,
        keys=70.3 * 1024**2 / 116,
        changes_per_s=10_000,
        commit_s=1,
        interval=SnapshotInterval.parse(interval.split(",")),
    )
    formula = Resources(planned).commits.uploaded_per_s * 200
    assert _close(formula, measured)
    assert {_bytes(measured), _bytes(formula)} <= set(re.findall(r"[\d.]+ [MG]B", page))


def _bytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def test_more_retained_checkpoints_store_more() -> None:
    """Each retained checkpoint adds to the stored bytes."""
    given = Workload(tasks=10, keys=1e7, changes_per_s=1e4)
    stored = [Resources(replace(given, retained=retained)).commits.stored_bytes for retained in (1, 2, 100)]
    assert stored[0] < stored[1] < stored[2]


def test_checkpoints_of_hours_and_days_need_at_most_the_whole_state_each() -> None:
    """More of them store more, and not more than copies would."""
    given = Workload(tasks=4, keys=1e6, changes_per_s=1000)
    plain, hourly, both = (
        Resources(replace(given, **more)).commits for more in ({}, {"hourly": 24}, {"hourly": 24, "daily": 7})
    )
    assert plain.stored_bytes < hourly.stored_bytes < both.stored_bytes
    assert both.stored_bytes - plain.stored_bytes <= 31 * (plain.state_bytes + given.tasks * plain.chain.bytes)


def test_records_that_are_being_sent_take_memory() -> None:
    """Each task of a process has a producer, which holds a limited part of the changes of a commit."""
    given = Workload(tasks=10, processes=5, stores=2, keys=1e7, changes_per_s=1e6, changelog=True)
    with_changelog, without = (Resources(one).memory_per_process for one in (given, replace(given, changelog=False)))
    assert with_changelog - without == 2 * QUEUE_BYTES


def test_an_idle_job_has_no_requests() -> None:
    """A job without changes has no uploads and causes no division by zero."""
    plan = Resources(Workload(tasks=8, processes=2, keys=1e6, changes_per_s=0))
    assert plan.commits.puts_per_s == plan.commits.uploaded_per_s == 0
    assert plan.restore_task_s > 0


def test_an_idle_job_pays_for_its_upkeep() -> None:
    """Each process lists orders as often as it looks at the job, and each needed blob is checked once a day."""
    assert resources.LOOK_S == coordinator.LOOK_S
    plan = Resources(Workload(tasks=8, processes=2, keys=1e6, changes_per_s=0))
    prices = replace(load_prices(None), restores_per_month=0)
    cost = plan.monthly_cost(prices)
    assert cost["blob store: LIST"] == pytest.approx(2 * 43_200 * prices.blob_store.put_1000 / 1000)
    checks = 8 * plan.needed_blobs * 30
    assert cost["blob store: GET"] == pytest.approx(checks * prices.blob_store.get_1000 / 1000)


def test_a_job_without_blobs_pays_no_blob_store() -> None:
    """With changelogs alone, no part of the cost is that of the blob store."""
    plan = Resources(Workload(tasks=1000, keys=1e9, changes_per_s=1e4, blobs=False))
    cost = plan.monthly_cost(load_prices(None))
    assert not any(value for part, value in cost.items() if part.startswith("blob store"))


def test_more_of_everything_never_costs_less() -> None:
    """Requests, bytes, time and cost grow with the state and the changes."""
    prices = load_prices(None)
    last: list[float] = [0.0] * 5
    for factor in (1, 10, 100, 1000):
        plan = Resources(Workload(tasks=100, processes=10, keys=1e6 * factor, changes_per_s=1e3 * factor))
        now = [
            plan.commits.puts_per_s,
            plan.commits.uploaded_per_s,
            plan.restore_machine_s,
            plan.disk_per_process,
            sum(plan.monthly_cost(prices).values()),
        ]
        assert all(before <= after for before, after in zip(last, now, strict=True)), (factor, last, now)
        last = now


def test_every_commit_a_snapshot_has_no_segments() -> None:
    """With ``1 commit``, only snapshots are uploaded, and a restore applies no segments."""
    given = Workload(tasks=10, keys=1e7, changes_per_s=1e4, interval=SnapshotInterval(commits=1))
    plan = Resources(given)
    assert plan.commits.segments_per_s == 0
    assert math.isclose(plan.commits.snapshots_per_s, plan.commits.commits_per_s)
    assert plan.apply_s == 0


@pytest.mark.parametrize("wrong", [{"keys": 0}, {"changes_per_s": -1}, {"processes": 9}, {"bandwidth": math.nan}])
def test_impossible_jobs_are_refused(wrong: dict[str, Any]) -> None:
    """An impossible number is refused."""
    with pytest.raises(InvalidError):
        Workload(**{"tasks": 8, "keys": 1.0, "changes_per_s": 1.0, **wrong})


# --- prices -----------------------------------------------------------------------------------------------------------


def test_storage_has_tiers() -> None:
    """Only the bytes within a tier have that tier's price."""
    store = load_prices(None).blob_store
    assert math.isclose(store.storage(60_000e9), 50_000 * 0.023 + 10_000 * 0.022)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("currency = [", "not TOML"),
        ("currency = 'EUR'", r"no table \[blob_store\]"),
        (default_table().replace("put_1000 = 0.005", "put_1000 = -1"), "put_1000 is not a price"),
        (default_table().replace("put_1000", "puts_1000"), "put_1000 is missing; puts_1000 is unknown"),
        (default_table().replace("up_to = inf", "up_to = 3"), "storage_gb"),
    ],
)
def test_a_wrong_price_table_is_refused(text: str, why: str, tmp_path: Path) -> None:
    """The error names the wrong part of the table."""
    table = tmp_path / "prices.toml"
    table.write_text(text)
    with pytest.raises(InvalidError, match=why):
        load_prices(table)


# --- the command ------------------------------------------------------------------------------------------------------


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["plan-capacity", *arguments], catch_exceptions=False)


def test_a_configuration_gives_the_defaults(tmp_path: Path) -> None:
    """Tasks, intervals and backends come from the file, and options override them."""
    file = tmp_path / "job.toml"
    file.write_text(
        'job.name = "orders"\njob.tasks = 40\ntask.inputs = ["a", "b"]\ntask.commit.ms = 5000\n'
        'task.backup.factories = ["blob-store", "kafka-changelog"]\nblob.store.uri = "file:///blobs"\n[stores.totals]\n'
    )
    both = json.loads(_run("-c", str(file), "--keys", "10M", "--changes", "4k", "--json").stdout)
    assert both["job"]["commits_per_s"] == pytest.approx(8)
    assert both["changelogs"]["written_per_s_bytes"] > 0 < both["blob store"]["put_per_s"]
    slower = json.loads(_run("-c", str(file), "--keys", "10M", "--changes", "4k", "--commit", "50", "--json").stdout)
    assert slower["job"]["commits_per_s"] == pytest.approx(0.8)


def test_the_table_is_for_people(tmp_path: Path) -> None:
    """Every quantity has a readable name, and an edited price table applies."""
    asked = ("--state", "500 GB", "--changes", "20k", "--tasks", "100", "--backup", "both")
    shown = _run(*asked).stdout
    assert "cost of a month" in shown
    assert "_" not in shown
    prices = tmp_path / "prices.toml"
    prices.write_text(_run("--print-prices").stdout.replace('"USD"', '"EUR"'))
    assert " EUR" in _run(*asked, "--prices", str(prices)).stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--changes", "1", "--tasks", "1"), "--state BYTES or --keys N"),
        (("--state", "1GB", "--tasks", "1"), "--changes N"),
        (("--state", "1GB", "--changes", "1"), "--tasks N"),
        (("--state", "lots", "--changes", "1"), "not a number such as"),
        (("--state", "1GB", "--changes", "1", "--tasks", "1", "--snapshot", "often"), "--snapshot"),
        (("--state", "1GB", "--changes", "1", "--tasks", "1", "--store-bandwidth", "0"), "store_bandwidth is 0.0"),
        (("--state", "1GB", "--changes", "1", "--tasks", "1", "--commit", "inf"), "give a number and a unit"),
        (("--state", "1GB", "--changes", "1", "--tasks", "1", "--lost", "nan"), "lost_share is nan"),
        (("--state", "1GB", "--changes", "1", "--tasks", "100001", "--simulate"), "at most 100,000 tasks"),
    ],
)
def test_a_missing_or_wrong_number_is_named(arguments: tuple[str, ...], why: str) -> None:
    """Wrong use has exit status 2, and the message names the option."""
    result = _run(*arguments)
    assert result.exit_code == 2
    assert why in result.output


def test_the_page_shows_what_the_command_prints() -> None:
    """The first command in docs/sizing.md prints the lines of the first example there."""
    (commands,) = blocks("docs/sizing.md", "# Sizing a job", "sh")
    (lines,) = blocks("docs/sizing.md", "# Sizing a job", "text")
    first = commands.strip().splitlines()[0].split()[2:]
    printed = [line.split() for line in _run(*first).stdout.splitlines()]
    for line in lines.strip().splitlines():
        words = line.split()[-3:]
        assert any(row[-3:] == words for row in printed), line
