"""The suites of Spark's own Python processors, as the installed PySpark has them, on either engine.

PySpark ships its tests to the executors, in ``python/lib/pyspark.zip``, so the files are those of the installed
version. Only the plumbing is adapted: the suites share the session of the run, their ``groupBy`` leads to ``stateful``,
each checkpoint location is a job, sequences are numbered like Spark's batches, and Spark's source ``statestore`` reads
``statemgr.state``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar
from unittest import TestCase

import pyspark.sql
import pytest
from pyspark import SparkConf
from pyspark.sql import DataFrameReader, GroupedData, SparkSession
from pyspark.sql import functions as sf

from spark_integration import RunningQuery, StatefulQuery, register, stateful
from spark_integration.writer import LOCATION, StatefulWriter
from statemgr import JobConfig
from tests.jobs import job_mapping
from tests.servers import KafkaServer

#: Module → its suite. The modules ``…_checkpoint_v2`` repeat them with another format of Spark's own state.
SUITES = {
    "test_pandas_grouped_map_with_state": "GroupedApplyInPandasWithStateTests",
    "streaming.test_pandas_transform_with_state": "TransformWithStateInPandasTests",
    "streaming.test_transform_with_state": "TransformWithStateInPySparkTests",
    "streaming.test_pandas_transform_with_state_state_variable": "TransformWithStateInPandasStateVariableTests",
    "streaming.test_transform_with_state_state_variable": "TransformWithStateInPySparkStateVariableTests",
    "streaming.test_tws_tester": "TwsTesterFuzzTests",  # compares a query with Spark's test harness for processors
}
_OPERATORS = ("transformWithState", "transformWithStateInPandas", "applyInPandasWithState")


def load(module: str) -> type[TestCase]:
    """Return a suite of the installed PySpark."""
    shipped = Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip" / "pyspark" / "sql"
    if str(shipped) not in pyspark.sql.__path__:
        pyspark.sql.__path__.append(str(shipped))
    found: type[TestCase] = getattr(import_module(f"pyspark.sql.tests.pandas.{module}"), SUITES[module])
    return found


class OnSpark:
    """A suite in the session of the run, with the settings that it asks for."""

    shared: ClassVar[SparkSession]
    spark: ClassVar[SparkSession]

    @classmethod
    def setUpClass(cls) -> None:
        cls.sc, cls.spark = cls.shared.sparkContext, cls.shared
        cls._before: dict[str, str | None] = {}
        for name, value in set(cls.conf().getAll()) - set(SparkConf().getAll()):  # type: ignore[attr-defined]
            cls._before[name] = cls.spark.conf.get(name, None)
            cls.spark.conf.set(name, value)

    @classmethod
    def tearDownClass(cls) -> None:
        for query in cls.spark.streams.active:
            query.stop()
        for name, value in cls._before.items():
            if value is None:
                cls.spark.conf.unset(name)
            else:
                cls.spark.conf.set(name, value)


class OnStatemgr(OnSpark):
    """A suite whose processors have their state in statemgr."""

    kafka: ClassVar[KafkaServer]
    _patched: ClassVar[pytest.MonkeyPatch]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls._patched = pytest.MonkeyPatch()
        plumb(cls._patched, cls.kafka, cls.spark)

    @classmethod
    def tearDownClass(cls) -> None:
        super().tearDownClass()
        cls._patched.undo()


def plumb(patch: pytest.MonkeyPatch, kafka: KafkaServer, spark: SparkSession) -> None:
    """Give Spark's operators a way to statemgr."""
    register(spark)
    jobs: dict[str, JobConfig] = {}

    def job(location: str) -> JobConfig:
        if location not in jobs:
            directory = Path(tempfile.mkdtemp())
            tasks = int(spark.conf.get("spark.sql.shuffle.partitions") or 0)
            mapping = job_mapping(kafka, directory, tasks=tasks, backup=["blob-store"])
            jobs[location] = JobConfig.from_mapping(mapping)
        return jobs[location]

    def operator(name: str) -> Callable[..., Any]:
        def apply(groups: GroupedData, *args: Any, **kwargs: Any) -> Any:
            keys = groups.count().schema.names[:-1]
            return getattr(stateful(groups._df, *keys, config=job("")), name)(*args, **kwargs)

        return apply

    start, each, read = StatefulQuery.start, StatefulWriter.foreachBatch, DataFrameReader.format

    def start_at(query: StatefulQuery, **permissions: Any) -> RunningQuery:
        location = str(query._options.get(LOCATION) or tempfile.mkdtemp())
        return start(replace(query, config=job(location)).option(LOCATION, location), **permissions)

    def read_format(reader: DataFrameReader, source: str) -> Any:
        return _StateReader(spark, job) if source == "statestore" else read(reader, source)

    for name in _OPERATORS:
        patch.setattr(GroupedData, name, operator(name))
    patch.setattr(StatefulQuery, "start", start_at)
    patch.setattr(StatefulWriter, "foreachBatch", lambda writer, write: each(writer, _numbered(write)))
    patch.setattr(DataFrameReader, "format", read_format)


def _numbered(write: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    return lambda rows, sequence: write(rows, sequence - 1)


class _StateReader:
    """``spark.read.format("statestore")`` for a variable of a job, with the columns that Spark gives to a list."""

    def __init__(self, spark: SparkSession, job: Callable[[str], JobConfig]) -> None:
        self._spark, self._job = spark, job
        self._options: dict[str, Any] = {}

    def option(self, name: str, value: Any) -> _StateReader:
        self._options[name] = value
        return self

    def load(self) -> Any:
        config = json.dumps(self._job(self._options["path"]).to_mapping())
        reader = self._spark.read.format("statemgr.state").option("config", config)
        rows = reader.option("stateVarName", self._options["stateVarName"]).load()
        return rows.withColumn("list_element", sf.col("value"))


#: Cases that fail with state in statemgr → the reason. docs/spark.md explains them.
DIFFERENT = {
    "test_transform_with_state_batch_query": "a batch has no state to keep",
    "test_transform_with_state_batch_query_initial_state": "a batch has no state to keep",
    "TransformWithStateInPandasTests.test_transform_with_state_int_to_decimal_coercion": "a batch has no state to keep",
    "test_transform_with_state_chaining_ops": "no second operator with state can follow",
    "test_transform_with_list_state_metadata": "reads what Spark's own state store writes",
    "test_transform_with_value_state_metadata": "reads what Spark's own state store writes",
}


def collect(namespace: dict[str, Any], engine: type[OnSpark], different: Mapping[str, str]) -> None:
    """Put the suites for an engine into a test module. ``different``: the cases that must fail there, and why."""
    for module, name in SUITES.items():
        suite = load(module)
        cases = {}
        for case in (case for case in dir(suite) if case.startswith("test_")):
            reason = different.get(case) or different.get(f"{name}.{case}")
            run = _of(getattr(suite, case))
            cases[case] = pytest.mark.xfail(reason=reason, strict=True)(run) if reason else run
        full = f"{name}{engine.__name__}"
        found = type(full, (engine, suite), {**cases, "__module__": namespace["__name__"]})
        namespace[full] = pytest.mark.heavy(pytest.mark.timeout(600)(found))


def _of(case: Callable[..., object]) -> Callable[..., None]:
    """Return a case as a function of its own, for marks that other engines do not get. It returns nothing."""

    @wraps(case)
    def run(self: TestCase) -> None:
        case(self)

    return run
