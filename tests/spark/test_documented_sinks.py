"""The sinks that users copy: those in docs/spark.md and the demo's."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from statemgr_tools.demo.pipeline import deliver
from tests.docs.blocks import blocks

Sink = Callable[[DataFrame, int], None]


def documented(directory: Path) -> Sink:
    """Return the ``write`` of the page with a different directory."""
    program = blocks("docs/spark.md", "### A function of your own")[0].partition("query = (")[0]
    imports = "\n".join(re.findall(r"^(?:import (?:os|tempfile)|from pathlib .*)$", program, re.MULTILINE))
    write = program[program.index("def write(") :]
    names: dict[str, Any] = {}
    exec(f"{imports}\n{write}", names)
    names["OUTPUT"] = directory
    sink: Sink = names["write"]
    return sink


@pytest.mark.long
@pytest.mark.parametrize("sink", ["documented", "demo"])
def test_a_sink_delivers_a_sequence_once(spark: SparkSession, tmp_path: Path, sink: str) -> None:
    """FAULT 42: a sink ignores a repeated or older sequence, and leaves nothing of one that fails half-way."""
    write = documented(tmp_path) if sink == "documented" else partial(_deliver, tmp_path)
    failing = "if(id = 9, raise_error('the disk is full'), id) as id"
    with pytest.raises(Exception, match="the disk is full"):
        write(spark.range(10).selectExpr(failing), 1)
    assert _delivered(spark, tmp_path) == {}
    for sequence in (1, 2, 4):
        write(spark.range(sequence), sequence)
    for sequence in (4, 2, 3):
        write(spark.range(100), sequence)

    assert _delivered(spark, tmp_path) == {1: 1, 2: 2, 4: 4}


@pytest.mark.long
def test_a_database_gets_a_sequence_once(spark: SparkSession, tmp_path: Path) -> None:
    """docs/spark.md: the database ignores repeated and older sequences, and keeps nothing of a failed one."""
    (program,) = blocks("docs/spark.md", "### foreachBatch")
    names: dict[str, Any] = {}
    exec(program, names)
    names["DATABASE"] = str(tmp_path / "totals.db")
    (declared,) = re.findall("create table .*$", program, re.MULTILINE)[:1]
    with closing(sqlite3.connect(names["DATABASE"])) as database, database:
        database.execute(declared)
    deliver_rows: Sink = names["deliver"]
    rows = spark.range(10).selectExpr("cast(id as string) as key", "id / 2 as total")
    failing = spark.range(10).selectExpr(
        "cast(id as string) as key", "if(id = 9, raise_error('lost'), id / 2) as total"
    )
    for sequence in (1, 2, 2, 1):
        deliver_rows(rows.limit(sequence), sequence)
    with pytest.raises(Exception, match="lost"):
        deliver_rows(failing, 3)
    deliver_rows(rows, 4)

    with closing(sqlite3.connect(names["DATABASE"])) as database:
        found = database.execute("select sequence, count(*), sum(total) from totals group by sequence").fetchall()
    assert found == [(1, 1, 0.0), (2, 2, 0.5), (4, 10, 22.5)]


def _deliver(directory: Path, rows: DataFrame, sequence: int) -> None:
    deliver(rows, sequence, directory)


def _delivered(spark: SparkSession, directory: Path) -> dict[int, int]:
    parts = directory.glob("sequence=*")
    return {int(part.name.partition("=")[2]): spark.read.parquet(str(part)).count() for part in parts}
