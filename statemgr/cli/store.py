"""``statemgr store``: keys and values of a published store, restored where nobody else looks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from statemgr.cli.options import checkpoint_option, json_option, tasks_option, with_config
from statemgr.cli.output import console, messages, print_json, print_table, progress_bars, show_error
from statemgr.config import JobConfig, StoreConfig
from statemgr.errors import ConfigError, InvalidError, StatemgrError
from statemgr.ports import LocalStore

if TYPE_CHECKING:
    from statemgr.serdes import Serde

_SERDES = click.Choice(["bytes", "hex", "string", "integer", "json", "msgpack"])
_key_serde = click.option("--key-serde", type=_SERDES, help="Default: the serde of the store.")
_value_serde = click.option("--value-serde", type=_SERDES, help="Default: the serde of the store.")


@click.group("store")
def command() -> None:
    """Read keys from the committed state of a store. Bytes that are not text are shown as 0x…."""


@command.command("get")
@with_config
@json_option
@tasks_option
@checkpoint_option
@_key_serde
@_value_serde
@click.argument("store")
@click.argument("key")
def get_command(
    config: JobConfig,
    as_json: bool,
    tasks: tuple[str, ...],
    checkpoint_id: str | None,
    key_serde: str | None,
    value_serde: str | None,
    store: str,
    key: str,
) -> None:
    """Print the value of KEY, from any task unless --task names one; exit status 1 if there is none."""
    wanted = parse(key, key_serde or _configured(config, store).key_serde)
    show = _value_serde_of(_configured(config, store), value_serde)
    for task, opened in _stores(config, store, tasks, checkpoint_id, quiet=as_json):
        value = opened.get(wanted)
        if value is None:
            continue
        if as_json:
            print_json({"task": task, "store": store, "key": key, "value": render(value, show)})
        else:
            click.echo(text(render(value, show)))
        return
    show_error(f"store {store} has no such key", "a key is found only with the serde that wrote it")
    raise SystemExit(1)


@command.command("scan")
@with_config
@json_option
@tasks_option
@checkpoint_option
@_key_serde
@_value_serde
@click.option("--from", "start", help="First key.")
@click.option("--to", "end", help="First key that is not shown.")
@click.option("--prefix", help="Show only keys that start with this.")
@click.option(
    "--limit", default=100, show_default=True, type=click.IntRange(min=0), help="Number of keys to show; 0 shows all."
)
@click.argument("store")
def scan_command(
    config: JobConfig,
    as_json: bool,
    tasks: tuple[str, ...],
    checkpoint_id: str | None,
    key_serde: str | None,
    value_serde: str | None,
    start: str | None,
    end: str | None,
    prefix: str | None,
    limit: int,
    store: str,
) -> None:
    """Print keys and values in key order, task by task."""
    keys = key_serde or _configured(config, store).key_serde
    values = _value_serde_of(_configured(config, store), value_serde)
    bounds = _bounds(start, end, prefix, lambda given: parse(given, keys))
    entries = (
        (task, render(key, keys), render(value, values))
        for task, opened in _stores(config, store, tasks, checkpoint_id, quiet=as_json)
        for key, value in opened.scan(*bounds)
    )
    shown, more = 0, False
    separator = "["
    for task, key, value in entries:
        if limit and shown == limit:
            more = True
            break
        shown += 1
        if as_json:
            # Written one by one: a store may be larger than the memory.
            click.echo(separator + json.dumps({"task": task, "key": key, "value": value}, ensure_ascii=False))
            separator = ","
        else:
            click.echo(f"{task}\t{text(key)}\t{text(value)}")
    if as_json:
        click.echo("]" if shown else "[]")
    elif more:
        messages().print(f"note: stopped after {limit} keys; use --limit 0 to show all", markup=False)


@command.command("count")
@with_config
@json_option
@tasks_option
@checkpoint_option
@click.argument("store")
def count_command(
    config: JobConfig, as_json: bool, tasks: tuple[str, ...], checkpoint_id: str | None, store: str
) -> None:
    """Count the keys of each task."""
    _configured(config, store)
    counts = [
        {"task": task, "store": store, "count": sum(1 for _ in opened.scan(None, None))}
        for task, opened in _stores(config, store, tasks, checkpoint_id, quiet=as_json)
    ]
    if as_json:
        print_json(counts)
        return
    print_table(("task", "keys"), [(entry["task"], entry["count"]) for entry in counts], empty="no tasks")
    console().print(f"{sum(int(str(entry['count'])) for entry in counts)} keys")


def parse(given: str, serde_name: str) -> bytes:
    """A key from the command line as bytes. Raises: InvalidError."""
    from statemgr.serdes import serde

    try:
        if serde_name == "bytes":
            return bytes.fromhex(given[2:]) if given.startswith("0x") else given.encode()
        if serde_name == "hex":
            return bytes.fromhex(given.removeprefix("0x"))
        readers: dict[str, Callable[[str], Any]] = {"integer": int, "json": json.loads, "msgpack": json.loads}
        return serde(serde_name).serialize(readers.get(serde_name, str)(given))
    except (ValueError, OverflowError, RecursionError, InvalidError):
        raise InvalidError(
            f"{given!r} is not a key of the serde {serde_name}", hint="choose another with --key-serde"
        ) from None


def render(data: bytes, serde_name: str | Serde) -> Any:
    """Bytes as something that JSON can hold. Raises: InvalidError."""
    from statemgr.serdes import serde

    if serde_name == "hex":
        return data.hex()
    try:
        if serde_name != "bytes":
            return _for_json(serde(serde_name).deserialize(data))
        decoded = data.decode()
        return decoded if decoded.isprintable() else f"0x{data.hex()}"
    except (ValueError, RecursionError, StatemgrError):
        if serde_name == "bytes":
            return f"0x{data.hex()}"
        raise InvalidError(
            f"the serde does not read 0x{data[:40].hex()}: {serde_name if isinstance(serde_name, str) else 'avro'}",
            hint="choose others with --key-serde and --value-serde",
        ) from None


def _for_json(value: Any) -> Any:
    """Bytes, dates and the like, which Avro and MessagePack have and JSON has not, as text."""
    if isinstance(value, dict):
        return {str(_for_json(key)): _for_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(item) for item in value]
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    return value if value is None or isinstance(value, str | int | float) else str(value)


def text(value: Any) -> str:
    """A rendered value on one line."""
    if isinstance(value, str) and value.isprintable():
        return value
    return json.dumps(value, ensure_ascii=False)


def _bounds(
    start: str | None, end: str | None, prefix: str | None, to_bytes: Callable[[str], bytes]
) -> tuple[bytes | None, bytes | None]:
    from statemgr.engine.store import after_prefix

    if prefix is None:
        return None if start is None else to_bytes(start), None if end is None else to_bytes(end)
    if start is not None or end is not None:
        raise click.UsageError("--prefix cannot be used with --from or --to")
    first = to_bytes(prefix)
    return first, after_prefix(first)


def _value_serde_of(store: StoreConfig, given: str | None) -> str | Serde:
    """The given serde, or the store's own."""
    from statemgr.serdes import value_serde

    return given or (value_serde(store) if store.value_serde == "avro" else store.value_serde)


def _configured(config: JobConfig, store: str) -> StoreConfig:
    if store not in config.stores:
        known = ", ".join(config.stores) or "none"
        raise ConfigError(f"the job has no store {store!r}", hint=f"it has: {known}", store=store)
    return config.stores[store]


def _stores(
    config: JobConfig, store: str, tasks: tuple[str, ...], checkpoint_id: str | None, *, quiet: bool
) -> Iterator[tuple[str, LocalStore]]:
    """Each task's store, opened one after the other. Raises: MissingState."""
    from statemgr.reader import JobReader

    with JobReader(config) as reader:
        for task in list(tasks) or reader.tasks(checkpoint_id):
            with ExitStack() as stack:
                with progress_bars(quiet=quiet) as progress:
                    opened = stack.enter_context(reader.open_store(task, store, checkpoint_id, progress))
                yield task, opened
