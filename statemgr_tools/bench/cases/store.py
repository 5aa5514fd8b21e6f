"""``store-calls``: the cost of a store's calls, compared with raw rocksdict. No server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from rocksdict import Rdict, WriteBatch

from statemgr.local.rocksdb import options as rocksdb_options
from statemgr.stores.store import Store
from statemgr_tools.bench import records
from statemgr_tools.bench.measure import Series, interleaved, seconds
from statemgr_tools.bench.operations import open_at
from statemgr_tools.bench.records import Pair
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, compared
from statemgr_tools.bench.session import Session

_RECORDS = 500_000
_SINGLE = 100_000
_BATCH = 1000
_BATCHES = Target("at most", 1.2)
_CALLS = Target("at most", 1.5)

Action = Callable[[], object]


@case("store-calls")
def store_calls(session: Session) -> Iterator[Line]:
    """Batches and single calls of put and get on a store of half a million records."""
    pairs = [pair for batch in records.batches(session.count(_RECORDS, least=5000)) for pair in batch]
    found = interleaved(
        {
            "through the store": lambda number: _through_store(session, pairs),
            "raw rocksdict": lambda number: _raw(session.fresh("raw"), pairs),
        },
        session.rounds,
        session.report,
    )
    ours, raw = found["through the store"], found["raw rocksdict"]
    yield _line("put_many of 1,000", ours, raw, "batch put", "rocksdict WriteBatch of 1,000", _BATCHES)
    yield _line("get_many of 1,000", ours, raw, "batch get", "rocksdict get of a list of 1,000", _BATCHES)
    yield _line("put", ours, raw, "put", "rocksdict put", _CALLS)
    yield _line("get", ours, raw, "get", "rocksdict get", _CALLS)


def _line(what: str, ours: Series, raw: Series, name: str, reference: str, target: Target) -> Line:
    return compared("store-calls", ours.median(name), f"µs a record, {what}", reference, raw.median(name), target)


def _through_store(session: Session, pairs: Sequence[Pair]) -> dict[str, float]:
    config = session.job("calls", kafka=False, task__backup__factories="blob-store")
    with open_at(config, None) as attempt:
        store: Store = attempt.store("s")
        batches = list(_batched(pairs))
        keys = [[key for key, _ in batch] for batch in batches]
        singles = pairs[:_SINGLE]

        def put_all() -> None:
            for batch in batches:
                store.put_many(batch)

        def get_all() -> None:
            for batch in keys:
                store.get_many(batch)

        def put_each() -> None:
            for key, value in singles:
                store.put(key, value)

        def get_each() -> None:
            for key, _ in singles:
                store.get(key)

        return _timed(len(pairs), len(singles), put_all, get_all, put_each, get_each)


def _raw(directory: Path, pairs: Sequence[Pair]) -> dict[str, float]:
    """Open raw rocksdict with the same options, also without a write-ahead log."""
    options = rocksdb_options.without_wal()
    database = Rdict(str(directory), rocksdb_options.normal({}, create=True))
    database.set_write_options(options)
    batches = list(_batched(pairs))
    keys = [[key for key, _ in batch] for batch in batches]
    singles = pairs[:_SINGLE]

    def put_all() -> None:
        for pairs_of_batch in batches:
            batch = WriteBatch(raw_mode=True)
            for key, value in pairs_of_batch:
                batch.put(key, value)
            database.write(batch, options)

    def get_all() -> None:
        for batch in keys:
            database.get(batch)  # type: ignore[arg-type]

    def put_each() -> None:
        for key, value in singles:
            database.put(key, value)

    def get_each() -> None:
        for key, _ in singles:
            database.get(key)

    try:
        return _timed(len(pairs), len(singles), put_all, get_all, put_each, get_each)
    finally:
        database.close()


def _timed(
    many: int, single: int, put_all: Action, get_all: Action, put_each: Action, get_each: Action
) -> dict[str, float]:
    """Return microseconds per record, in the order: fill, read, overwrite one by one, read one by one."""
    return {
        "batch put": seconds(put_all) / many * 1e6,
        "batch get": seconds(get_all) / many * 1e6,
        "put": seconds(put_each) / single * 1e6,
        "get": seconds(get_each) / single * 1e6,
    }


def _batched(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    remaining = iter(pairs)
    while batch := list(islice(remaining, _BATCH)):
        yield batch
