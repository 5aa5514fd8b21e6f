"""``statemgr store``: shows keys and values of a published store. Of a large one in a blob store, it fetches only what
it reads, unless that is most of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from statemgr.terminal.items import key_serde_option, parse, render, text, value_serde_of, value_serde_option
from statemgr.terminal.options import Call, job_options
from statemgr.terminal.output import console, print_json, printable, say, show_error

if TYPE_CHECKING:
    from statemgr.ports import ReadableStore


@click.group("store")
def command() -> None:
    """Read keys from the committed state of a store.

    Bytes that are not text are shown as 0x…, and so is text that begins with 0x. Other text with control characters is
    in quotes.
    """


@command.command("get", short_help="Print the value of a key.")
@job_options("tasks", "checkpoint")
@key_serde_option
@value_serde_option
@click.argument("store")
@click.argument("key")
def get_command(call: Call, key_serde: str | None, value_serde: str | None, store: str, key: str) -> None:
    """Print the value of KEY, from any task unless --task names one; exit status 1 if there is none."""
    configured = call.config.store(store)
    keys = key_serde or configured.key_serde
    wanted = parse(key, keys)
    serde = value_serde_of(configured, value_serde)
    for task, opened in _stores(call, store):
        found = opened.get(wanted)
        if found is None:
            continue
        value = render(found, serde)
        if call.as_json:
            print_json({"task": task, "store": store, "key": key, "value": value})
        else:
            click.echo(text(value))
        return
    is_hex = keys == "bytes" and key.startswith("0x")
    more = "; for text that begins with 0x, use --key-serde string" if is_hex else ""
    show_error(f"store {store} has no such key", f"a key is found only with the serde that wrote it{more}")
    raise SystemExit(1)


@command.command("scan")
@job_options("tasks", "checkpoint")
@key_serde_option
@value_serde_option
@click.option("--from", "start", help="First key.")
@click.option("--to", "end", help="First key that is not shown.")
@click.option("--prefix", help="Show only keys that start with this.")
@click.option(
    "--limit", default=100, show_default=True, type=click.IntRange(min=0), help="Number of keys to show; 0 shows all."
)
@click.argument("store")
def scan_command(
    call: Call,
    key_serde: str | None,
    value_serde: str | None,
    start: str | None,
    end: str | None,
    prefix: str | None,
    limit: int,
    store: str,
) -> None:
    """Print keys and values in key order, task by task."""
    configured = call.config.store(store)
    keys, values = key_serde or configured.key_serde, value_serde_of(configured, value_serde)
    bounds = _bounds(start, end, prefix, lambda given: parse(given, keys))
    stores = _stores(call, store, whole=not limit and bounds == (None, None))
    entries = (
        (task, render(key, keys), render(value, values))
        for task, opened in stores
        for key, value in opened.scan(*bounds)
    )
    shown, more = 0, False
    separator = ""
    if call.as_json:
        click.echo("[")
    try:
        for task, key, value in entries:
            if limit and shown == limit:
                more = True
                break
            shown += 1
            if call.as_json:
                # one by one, because a store may be larger than the memory
                entry = json.dumps({"task": task, "key": key, "value": value}, ensure_ascii=False)
                click.echo(separator + printable(entry))
                separator = ","
            else:
                click.echo(f"{task}\t{text(key)}\t{text(value)}")
    finally:
        if call.as_json:
            click.echo("]")  # what was printed before an error is JSON, too
        stores.close()  # removes what was restored; an error would keep it
    if more and not call.as_json:
        say(f"note: stopped after {limit} keys; use --limit 0 to show all")


@command.command("count")
@job_options("tasks", "checkpoint")
@click.argument("store")
def count_command(call: Call, store: str) -> None:
    """Count the keys of each task."""
    call.config.store(store)
    counts = [(task, sum(1 for _ in opened.scan(None, None))) for task, opened in _stores(call, store, whole=True)]
    found = [{"task": task, "store": store, "count": count} for task, count in counts]
    call.show(found, ("task", "keys"), counts, empty="no tasks")
    if not call.as_json:
        console().print(f"{sum(count for _, count in counts)} keys")


def _bounds(
    start: str | None, end: str | None, prefix: str | None, to_bytes: Callable[[str], bytes]
) -> tuple[bytes | None, bytes | None]:
    from statemgr.stores.store import after_prefix

    if prefix is None:
        return None if start is None else to_bytes(start), None if end is None else to_bytes(end)
    if start is not None or end is not None:
        raise click.UsageError("--prefix cannot be used with --from or --to")
    first = to_bytes(prefix)
    return first, after_prefix(first)


def _stores(call: Call, store: str, *, whole: bool = False) -> Generator[tuple[str, ReadableStore]]:
    """Each task's store, opened one after the other. ``whole``: most of it will be read. Raises: MissingState."""
    with call.reader() as reader:
        for task in call.tasks or reader.tasks(call.checkpoint_id):
            with ExitStack() as stack:
                with call.progress() as progress:
                    opened = stack.enter_context(
                        reader.open_store(task, store, call.checkpoint_id, progress, whole=whole)
                    )
                yield task, opened
