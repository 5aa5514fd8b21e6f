"""``statemgr plan-capacity``: requests, bytes, cost and times of a planned job. Connects to nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from statemgr.terminal.options import duration, json_option, overrides
from statemgr.terminal.output import print_json, print_table, say

if TYPE_CHECKING:
    from statemgr_tools.sizing.workload import Workload

_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([A-Za-z]*)\Z")
#: The maximum number of tasks in a simulation: 100,000 take about 10 s and 1 GB of memory.
_MOST_SIMULATED = 100_000
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_FACTORS: dict[str, int] = _DECIMAL | {f"{letter}i": 1024**power for power, letter in enumerate("kmgtp", 1)}


class Amount(click.ParamType):  # type: ignore[type-arg]
    """A number such as ``20k``, ``1.5M``, ``100 GB`` or ``64 MiB``. ``k``, ``M``, ``G``, ``T`` and ``P`` are powers of
    1,000, and ``Ki``, ``Mi``, … powers of 1,024."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = _NUMBER.match(str(value).strip())
        unit = match[2].lower().removesuffix("b") if match else ""
        factor = _FACTORS.get(unit)
        if match is None or factor is None:
            self.fail("not a number such as 20k, 500GB or 64MiB", param, ctx)
        return float(match[1]) * float(factor)


def _amount(
    name: str, text: str, *, metavar: str = "N", default: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    shown = f" Default: {default}." if default else ""
    return click.option(name, type=Amount(), metavar=metavar, help=text + shown)


@click.command("plan-capacity")
@click.option(
    "--config", "-c", "config_file", type=click.Path(), help="Take tasks, stores, intervals and sizes from this file."
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key of the configuration. Repeatable."
)
@_amount("--state", "Bytes of keys and values of the whole job, such as 500GB.", metavar="BYTES")
@_amount("--keys", "Keys of the whole job, instead of --state.")
@_amount("--key-size", "Mean size of a key.", metavar="BYTES", default="16")
@_amount("--value-size", "Mean size of a value.", metavar="BYTES", default="100")
@_amount("--changes", "Puts and deletes per second of the whole job.", metavar="N/S")
@click.option("--tasks", type=click.IntRange(min=1), help="Tasks of the job. Default: job.tasks.")
@click.option(
    "--processes", type=click.IntRange(min=1), help="Processes that run them, one a machine. Default: one for 10 tasks."
)
@click.option(
    "--commit",
    callback=duration(least=0.001),
    metavar="TIME",
    help="Time between commits; a plain number has seconds. Default: task.commit.ms.",
)
@click.option("--snapshot", metavar="LIMITS", help="As task.commit.snapshot.interval: '50 commits, 256 MiB, 10 min'.")
@click.option(
    "--backup",
    type=click.Choice(["blob-store", "kafka-changelog", "both"]),
    help="What commits feed. Default: as the configuration; blob-store without one.",
)
@_amount("--disk-ratio", "Bytes of table files for a byte of keys and values; below 1 if they compress.", default="1")
@click.option(
    "--get-latency",
    "get_s",
    callback=duration("ms"),
    metavar="TIME",
    help="Of the blob store, for a small GET; a plain number has milliseconds. Default: 30 ms.",
)
@click.option(
    "--put-latency", "put_s", callback=duration("ms"), metavar="TIME", help="For a small PUT. Default: 50 ms."
)
@_amount("--bandwidth", "Bytes a second between a process and the blob store.", metavar="BYTES", default="500MB")
@_amount("--store-bandwidth", "The same for all processes together. Default: no limit.", metavar="BYTES")
@click.option(
    "--lost",
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="Part of the uploads that a dead process leaves unpublished, until their TTL ends. Default: 0.01.",
)
@click.option("--replicas", type=click.IntRange(min=1), help="Replicas of the topics. Default: 3.")
@click.option("--simulate", is_flag=True, help="Also simulate the commits of all processes, and show what limits them.")
@click.option("--brokers", type=click.IntRange(min=1), default=3, show_default=True, help="For --simulate: brokers.")
@click.option(
    "--publish-rate",
    type=click.FloatRange(0, min_open=True),
    default=350.0,
    show_default=True,
    metavar="N/S",
    help="For --simulate: publishes that one broker coordinates, and that the leader of one partition takes.",
)
@click.option(
    "--store-rate",
    type=click.FloatRange(0, min_open=True),
    default=3500.0,
    show_default=True,
    metavar="N/S",
    help="For --simulate: PUTs and tag requests that the blob store takes for this job.",
)
@click.option(
    "--prices", "price_file", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="A price table."
)
@click.option("--print-prices", is_flag=True, help="Print the price table of this release, and do nothing else.")
@json_option
def command(
    config_file: str | None,
    settings: tuple[str, ...],
    price_file: Path | None,
    print_prices: bool,
    as_json: bool,
    simulate: bool,
    brokers: int,
    publish_rate: float,
    store_rate: float,
    **given: Any,
) -> None:
    """Plan a job: blob requests, bytes, monthly cost, restore time, topics, disk, memory and network.

    Give at least the size of the state and the rate of its changes. The results are formulas for a consumer loop whose
    tasks are alike and whose keys change at random; docs/sizing.md says where each number comes from. Nothing is
    contacted. Numbers may have units: 20k, 1.5M, 100GB, 64MiB.

    \b
    statemgr plan-capacity --state 500GB --changes 20k --tasks 100 --processes 10
    statemgr plan-capacity -c job.toml --keys 4G --changes 100k --json
    """
    from statemgr_tools.sizing.prices import default_table, load_prices
    from statemgr_tools.sizing.report import in_words, results, rows, simulated, stage_rows
    from statemgr_tools.sizing.simulation import Services

    if print_prices:
        click.echo(default_table(), nl=False)
        return
    workload = _workload(_configured(config_file, settings), given)
    prices = load_prices(price_file)
    found = results(workload, prices)
    outcomes = {}
    if simulate:
        if workload.tasks > _MOST_SIMULATED:
            raise click.UsageError(
                f"--simulate takes at most {_MOST_SIMULATED:,} tasks, and {workload.tasks:,} are planned: simulate a "
                "part of the job, or leave --simulate out"
            )
        rates = {"transactions_per_s": publish_rate, "topic_per_s": publish_rate, "store_per_s": store_rate}
        outcomes = simulated(workload, Services(brokers=brokers, **rates))
    if as_json:
        more = {"simulation": {when: asdict(outcome) for when, outcome in outcomes.items()}} if simulate else {}
        print_json({"currency": prices.currency, **found, **more})
        return
    print_table(("", "what", "value"), rows(found, prices.currency), empty="")
    for when, outcome in outcomes.items():
        click.echo(
            f"\n{when}: a commit takes {in_words('p50_s', outcome.p50_s)} (median), "
            f"{in_words('p99_s', outcome.p99_s)} (p99), {in_words('longest_s', outcome.longest_s)} (longest)"
        )
        print_table(
            ("stage", "busy", "waited, p50", "waited, p99", "tasks until it is 70% busy"),
            stage_rows(outcome, workload),
            empty="",
        )
    say("a new owner also waits until Kafka notices that a process is dead (session.timeout.ms)")


def _configured(config_file: str | None, settings: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings from the configuration; nothing without a file and settings. Raises: ConfigError, OSError."""
    from statemgr.config import JobConfig
    from statemgr_tools.sizing.workload import settings_of

    if config_file is not None:
        return settings_of(JobConfig.from_file(config_file, overrides(settings)))
    if not settings:
        return {}
    planned = {"job.name": "planned", "task.backup.factories": "blob-store", "stores.state.type": "rocksdb"}
    return settings_of(JobConfig.from_mapping({**planned, "blob.store.uri": "file:///planned", **overrides(settings)}))


def _workload(configured: dict[str, Any], given: dict[str, Any]) -> Workload:
    """Return the planned job. Options override the configuration. Raises: click.UsageError, InvalidError."""
    from statemgr.config.policies import SnapshotInterval
    from statemgr_tools.sizing.workload import Workload

    names = {
        "tasks": "tasks",
        "processes": "processes",
        "commit": "commit_s",
        "key_size": "key_bytes",
        "value_size": "value_bytes",
        "changes": "changes_per_s",
        "keys": "keys",
        "disk_ratio": "disk_ratio",
        "bandwidth": "bandwidth",
        "store_bandwidth": "store_bandwidth",
        "replicas": "replication",
    }
    found = configured | {names[name]: value for name, value in given.items() if name in names and value is not None}
    if (given["state"] is None) == (given["keys"] is None):
        raise click.UsageError("give the size of the state: --state BYTES or --keys N, and not both")
    if given["changes"] is None:
        raise click.UsageError("give the changes per second of the whole job: --changes N")
    if "tasks" not in found:
        raise click.UsageError("give --tasks N, or a configuration with -c FILE")
    if given["state"] is not None:
        size = found.get("key_bytes", Workload.key_bytes) + found.get("value_bytes", Workload.value_bytes)
        if not size:
            raise click.UsageError("a key and its value have 0 bytes: give --key-size or --value-size")
        found["keys"] = given["state"] / size
    found |= {name: given[name] for name in ("get_s", "put_s") if given[name] is not None}
    if given["lost"] is not None:
        found["lost_share"] = given["lost"] / 100
    if given["backup"] is not None:
        found |= {"blobs": given["backup"] != "kafka-changelog", "changelog": given["backup"] != "blob-store"}
    if given["snapshot"] is not None:
        try:
            found["interval"] = SnapshotInterval.parse(given["snapshot"].split(","))
        except ValueError:
            raise click.BadParameter(
                "not one limit of each kind, such as '50 commits, 256 MiB, 10 min'", param_hint="--snapshot"
            ) from None
    found.setdefault("processes", -(-found["tasks"] // 10))
    return Workload(**found)
