"""The demo's main job, which runs in its own process: ``python -m statemgr_tools.demo.pipeline spec.json``.

For each key, it keeps a :class:`Tally` in the store ``totals``. Its output writes each batch's changes as Parquet, once
to one directory per sequence number.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_integration.context import StateContext
from spark_integration.query import StatefulQuery
from spark_integration.reports import BatchReport
from statemgr import JobConfig
from statemgr.errors import StatemgrError
from statemgr_tools.demo.bait import Bait, install
from statemgr_tools.demo.measures import Tally, measures_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from statemgr import Store

STORE = "totals"
#: The partitioner for Kafka's own keys, which are bytes.
PARTITIONER = "spark-hash(binary)"
#: The output has a directory for each sequence number, which exists either completely or not at all.
_SEQUENCE = "sequence="
OUTPUT_DDL = "key binary, change string, total string"
#: Keys that one task holds in memory before it writes them to the store.
_KEYS_IN_MEMORY = 20_000


@dataclass(frozen=True)
class Spec:
    """Arguments of the child process, as JSON: paths, the topic, and the phase and batch of the kill.

    ``endless``: the process waits for further rows and does not end.
    """

    config: str
    location: str
    output: str
    events: str
    scratch: str
    bootstrap_servers: str
    topic: str
    sums: tuple[str, ...]
    rows_per_batch: int
    bait: tuple[str, int, str] | None = None
    endless: bool = False

    def save(self, path: Path) -> None:
        """Write the spec where :meth:`load` finds it."""
        path.write_text(json.dumps(asdict(self), indent=2))

    @classmethod
    def load(cls, path: Path) -> Spec:
        """Read the spec that :meth:`save` wrote."""
        data = json.loads(path.read_text())
        return cls(**{**data, "sums": tuple(data["sums"])})


class Totals:
    """The process function: adds the batch's rows to the stored tallies."""

    def __init__(self, sums: tuple[str, ...], bait: Bait | None) -> None:
        self.sums = sums
        self.bait = bait

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Read rows of ``key`` and ``value``; yield each key's change in the batch and its new total."""
        install(self.bait)
        _, measures = measures_of(self.sums)
        changes: dict[bytes, Tally] = {}
        for batch in batches:
            for key, value in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True):
                tally = changes.get(key)
                if tally is None:
                    tally = changes[key] = Tally(len(measures))
                tally.add_row(_row(value), measures)
            if len(changes) >= _KEYS_IN_MEMORY:
                yield self._save(changes, stores[STORE])
                changes = {}
        if changes:
            yield self._save(changes, stores[STORE])

    def _save(self, changes: dict[bytes, Tally], store: Store) -> pa.RecordBatch:
        keys = sorted(changes)
        deltas = [changes[key].to_json() for key in keys]
        totals = []
        for key, saved in zip(keys, store.get_many(keys), strict=True):
            total = changes[key]
            if saved is not None:
                total.add(Tally.from_json(saved))
            totals.append(total.to_json())
        store.put_many([(key, total.encode()) for key, total in zip(keys, totals, strict=True)])
        return pa.RecordBatch.from_pydict({"key": keys, "change": deltas, "total": totals})


def _row(value: bytes | None) -> list[str] | None:
    row = None if value is None else json.loads(value)
    return row if isinstance(row, list) else None


def run(spec: Spec) -> None:
    """Run the job over all rows that the topic has now, or until it is killed."""
    spark = _session(spec)
    bait = None if spec.bait is None else Bait(*spec.bait)
    install(bait)

    def report(batch: BatchReport) -> None:
        if bait is not None:
            bait.current += 1
        with Path(spec.events).open("a") as events:
            events.write(json.dumps(batch.to_dict()) + "\n")

    def source(starting_offsets: str) -> DataFrame:
        return (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", spec.bootstrap_servers)
            .option("subscribe", spec.topic)
            .option("startingOffsets", starting_offsets)
            .option("maxOffsetsPerTrigger", spec.rows_per_batch)
            .load()
            .selectExpr("coalesce(key, binary('')) AS key", "value")  # a row without a key has the empty one
        )

    def write(rows: DataFrame, sequence: int) -> None:
        deliver(rows, sequence, Path(spec.output))

    trigger = {"processingTime": "1 second"} if spec.endless else {"availableNow": True}
    query = (
        StatefulQuery(JobConfig.from_file(spec.config))
        .input(source)
        .key_by("key")
        .process(Totals(spec.sums, bait), OUTPUT_DDL)
        .output(write)
        .on_batch(report)
        .queryName("totals")
        .trigger(**trigger)
        .option("checkpointLocation", spec.location)
        .start()
    )
    query.awaitTermination()
    spark.stop()


def _session(spec: Spec) -> SparkSession:
    from pyspark.sql import SparkSession

    from statemgr_tools.dev import connector_jars, find_java

    find_java()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings: dict[str, Any] = {
        "spark.jars": ",".join(str(jar) for jar in connector_jars()),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": f"{spec.scratch}/spark",
        "spark.sql.warehouse.dir": f"{spec.scratch}/warehouse",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": java_options(spec.scratch),
    }
    builder = SparkSession.builder.master("local[2]").appName("statemgr demo")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def java_options(scratch: str) -> str:
    """Return options of the driver's JVM. A killed JVM leaves files only in ``scratch``."""
    # Spark splits the text at spaces, except in quotes.
    quoted = scratch.replace("\\", "\\\\").replace('"', '\\"')
    return f'"-Djava.io.tmpdir={quoted}" -XX:+UseSerialGC -XX:TieredStopAtLevel=1'


def main() -> int:
    """Return exit status 0 after every row is done. A typed error prints one line to stderr and has its own status."""
    try:
        run(Spec.load(Path(sys.argv[1])))
    except StatemgrError as error:
        sys.stderr.write(f"statemgr: {type(error).__name__}: {error}\n")
        return error.exit_status
    return 0


def deliver(rows: DataFrame, sequence: int, directory: Path) -> None:
    """Write the rows to a temporary directory and rename it, unless this sequence or a newer one exists already.

    So a repeated sequence changes nothing, and a driver that was suspended cannot replace its successor's output.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if sequence <= newest(directory):
        return
    temporary = tempfile.mkdtemp(prefix=".sequence-", dir=directory)
    rows.write.mode("overwrite").parquet(temporary)
    Path(temporary).rename(directory / f"{_SEQUENCE}{sequence:08d}")


def newest(directory: Path) -> int:
    """Return the newest sequence in the output, or 0."""
    return max((int(path.name.removeprefix(_SEQUENCE)) for path in directory.glob(f"{_SEQUENCE}*")), default=0)


if __name__ == "__main__":
    sys.exit(main())
