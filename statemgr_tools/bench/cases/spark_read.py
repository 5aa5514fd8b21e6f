"""``spark-read``: how fast the data source ``statemgr.state`` decodes a restored store into Arrow. No server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from spark_integration.processors.keys import encode_key
from spark_integration.processors.states import variable_prefix
from spark_integration.processors.values import value_serde
from spark_integration.processors.variables import MAP, VALUE, Record, Variable
from spark_integration.reading.sources import ItemColumns
from spark_integration.reading.variables import VariableColumns
from statemgr.local import bulk_writer, scan_in_batches
from statemgr_tools.bench import records
from statemgr_tools.bench.measure import interleaved, seconds
from statemgr_tools.bench.records import Pair
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, alone
from statemgr_tools.bench.session import Session

_ROWS = 400_000
_BATCH = 10_000
_TARGET = Target("at least", 400_000, "value")
_KEY = StructType([StructField("user", StringType())])
_PAGE = StructType([StructField("day", IntegerType()), StructField("page", StringType())])
_VALUE = StructType([StructField("count", LongType()), StructField("note", StringType())])

Columns = Callable[[Sequence[Pair]], list[pa.Array]]


@case("spark-read")
def spark_read(session: Session) -> Iterator[Line]:
    """Rows per second on one core: the items of a store of bytes, and a value and a map of a processor."""
    count = session.count(_ROWS, least=5000)
    config = session.job("read", kafka=False, task__backup__factories="blob-store")
    value, by_page = Variable("v", VALUE, (_VALUE,)), Variable("v", MAP, (_VALUE,), _PAGE)
    record = Record(_KEY, "s", "none", {})
    pairs = [pair for batch in records.batches(count) for pair in batch]
    kinds: dict[str, tuple[Path, Columns]] = {
        "items of bytes": (_filled(session.fresh("items"), pairs), ItemColumns(config, "s").arrays),
        "a value of a processor": (
            _filled(session.fresh("value"), list(_rows(count, value))),
            VariableColumns(record, value).arrays,
        ),
        "a map of a processor": (
            _filled(session.fresh("map"), list(_rows(count, by_page))),
            VariableColumns(record, by_page).arrays,
        ),
    }

    def read(directory: Path, columns: Columns, _: int) -> float:
        return seconds(lambda: _read(directory, columns, count))

    variants = {name: partial(read, directory, columns) for name, (directory, columns) in kinds.items()}
    found = interleaved(variants, session.rounds, session.report)
    for name, series in found.items():
        yield alone("spark-read", count / series.median(), f"rows a second, {name}", "from restored files", _TARGET)


def _rows(count: int, variable: Variable) -> Iterator[Pair]:
    prefix, serialize = variable_prefix(variable.name), value_serde(variable.versions).serialize
    for number in range(count):
        key = prefix + encode_key(_KEY, (f"user-{number:09}",))
        if variable.key is not None:
            key += encode_key(variable.key, (number % 30, f"page-{number % 7}"))
        yield key, serialize((number, f"note {number}"))


def _filled(directory: Path, pairs: Sequence[Pair]) -> Path:
    with bulk_writer("rocksdb", directory, {}) as writer:
        writer.write(pairs)
    return directory


def _read(directory: Path, columns: Columns, count: int) -> None:
    rows = 0
    for batch in scan_in_batches(directory, {}, None, None, _BATCH):
        rows += len(columns(batch)[0])
    assert rows == count
