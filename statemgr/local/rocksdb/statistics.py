"""Reads RocksDB's numbers about an open database, under RocksDB's own names."""

from __future__ import annotations

from rocksdict import Options, Rdict

_PROPERTIES = (
    "rocksdb.estimate-num-keys",
    "rocksdb.estimate-live-data-size",
    "rocksdb.live-sst-files-size",
    "rocksdb.total-sst-files-size",
    "rocksdb.num-files-at-level0",
    "rocksdb.estimate-pending-compaction-bytes",
    "rocksdb.compaction-pending",
    "rocksdb.num-running-compactions",
    "rocksdb.num-running-flushes",
    "rocksdb.num-immutable-mem-table",
    "rocksdb.cur-size-all-mem-tables",
    "rocksdb.size-all-mem-tables",
    "rocksdb.estimate-table-readers-mem",
    "rocksdb.block-cache-capacity",
    "rocksdb.block-cache-usage",
    "rocksdb.block-cache-pinned-usage",
    "rocksdb.num-snapshots",
    "rocksdb.actual-delayed-write-rate",
    "rocksdb.is-write-stopped",
    "rocksdb.background-errors",
)


def of(database: Rdict, options: Options) -> dict[str, float]:
    """All properties, and counters and histograms if the options enable statistics."""
    found: dict[str, float] = {}
    for name in _PROPERTIES:
        value = database.property_int_value(name)
        if value is not None:
            found[name] = value
    for line in (options.get_statistics() or "").splitlines():
        found.update(_counted(line))
    return found


def _counted(line: str) -> dict[str, float]:
    """``name COUNT : 3`` is a ticker; ``name P50 : 1.5 P95 : … COUNT : 3 SUM : 7`` is a histogram."""
    name, *words = line.split()
    numbers = {
        label.lower(): float(value) for label, _, value in zip(words[::3], words[1::3], words[2::3], strict=True)
    }
    if set(numbers) == {"count"}:
        return {name: int(numbers["count"])}
    return {f"{name}.{label}": value for label, value in numbers.items()}
