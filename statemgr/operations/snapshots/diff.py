"""``statemgr snapshots diff``: the keys that changed between two checkpoints. Fences nobody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from statemgr.config import JobConfig
from statemgr.errors import MissingState
from statemgr.terminal.items import key_serde_option, render, text, value_serde_of, value_serde_option
from statemgr.terminal.options import Call, checkpoint_id_of, job_options
from statemgr.terminal.output import print_json, say

if TYPE_CHECKING:
    from statemgr.flows.state_diff import KeyChange, Pair


@click.command("diff", short_help="Print the keys that differ between two checkpoints.")
@job_options("tasks")
@click.option("--store", "stores", multiple=True, help="Compare only this store. Repeatable; default: all stores.")
@key_serde_option
@value_serde_option
@click.option(
    "--limit", default=100, show_default=True, type=click.IntRange(min=0), help="Number of keys to show; 0 shows all."
)
@click.argument("before", metavar="ID", callback=checkpoint_id_of)
@click.argument("after", metavar="ID", callback=checkpoint_id_of)
def diff_command(
    call: Call,
    stores: tuple[str, ...],
    key_serde: str | None,
    value_serde: str | None,
    limit: int,
    before: str,
    after: str,
) -> None:
    """Print the keys that changed from one retained checkpoint to another, with their values.

    With --json it prints one object on each line. A running job is not disturbed.

    \b
    Exit status: 0 the checkpoints are equal
                 1 they differ
    """
    from statemgr.flows.state_diff import compare, find_pairs
    from statemgr.reader import JobReader
    from statemgr.wiring import open_services

    shown = compared = 0
    with closing(open_services(call.config)) as services, JobReader(call.config, only_settled=True) as reader:
        pairs = find_pairs(reader.retaining(before, call.tasks), before, after, all_of_them=bool(call.tasks))
        for pair, store in _stores(call.config, pairs, stores):
            compared += 1
            config = call.config.stores[store]
            keys, values = key_serde or config.key_serde, value_serde_of(config, value_serde)
            with call.progress() as progress:
                changes = compare(services, pair, store, progress)
                change = next(changes, None)  # both states are restored now, and nothing else makes progress
            while change is not None and not (limit and shown == limit):
                shown += 1
                _print(pair.record.task, store, change, keys, values, as_json=call.as_json)
                change = next(changes, None)
            changes.close()
            if change is not None:
                say(f"note: stopped after {limit} keys; use --limit 0 to show all")
                break
    if not shown:
        say(f"{compared} stores are equal")
    else:
        raise SystemExit(1)


def _stores(config: JobConfig, pairs: Sequence[Pair], stores: Sequence[str]) -> Iterator[tuple[Pair, str]]:
    """The stores that either checkpoint of a pair has. Raises: ConfigError if the configuration lacks one; MissingState
    if no pair has one of ``stores``."""
    all_of_them = {store for pair in pairs for one in (pair.before, pair.after) for store in one.stores}
    for store in stores or sorted(all_of_them):
        config.store(store)
    missing = set(stores) - all_of_them
    if missing:
        raise MissingState(
            "the checkpoints have no state of these stores",
            hint="`statemgr checkpoints list` shows the stores that each has",
            stores=", ".join(sorted(missing)),
        )
    for pair in pairs:
        has = {*pair.before.stores, *pair.after.stores}
        for store in sorted(has & set(stores) if stores else has):
            yield pair, store


def _print(task: str, store: str, change: KeyChange, keys: str, values: Any, *, as_json: bool) -> None:
    key = render(change.key, keys)
    before, after = (None if value is None else render(value, values) for value in (change.before, change.after))
    if as_json:
        line = {"task": task, "store": store, "change": change.kind, "key": key, "before": before, "after": after}
        print_json(line, indent=None)
        return
    sides = [text(value) for side, value in ((change.before, before), (change.after, after)) if side is not None]
    click.echo("\t".join((task, store, change.kind, text(key), " → ".join(sides))))
