"""Reads Spark's checkpoint location through Hadoop's file systems, so that it may be on any that Spark supports."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_integration.sessions import JvmRefused, jvm_of
from statemgr.errors import CorruptRecord

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Location:
    """A checkpoint location. ``uri`` is the location as the user passed it to Spark."""

    def __init__(self, spark: SparkSession, uri: str) -> None:
        self._spark: Any = spark
        self.uri = uri.rstrip("/")

    def query_id(self) -> str | None:
        """The ID of the query that the location belongs to, or None if the location is new. Raises: CorruptRecord."""
        lines = self.read("metadata")
        if lines is None:
            return None
        try:
            return str(json.loads(lines[0])["id"])
        except (ValueError, KeyError, IndexError) as error:
            raise CorruptRecord("the location's metadata cannot be read", location=self.uri) from error

    def read(self, name: str) -> list[str] | None:
        """Return the non-empty lines of a file in the location, or None if there is no such file."""
        local = _local_path(self.uri)
        if local is not None:
            try:
                text = Path(local, name).read_text()
            except FileNotFoundError:
                return None
            return _lines(text.splitlines())
        try:
            with jvm_of(self._spark) as jvm:
                lines = self._read_hadoop(jvm, f"{self.uri}/{name}")
        except JvmRefused:
            return self._read_by_job(name)
        return None if lines is None else _lines(lines)

    def write(self, name: str, text: str) -> None:
        """Write or replace a file in the location. Raises: JvmRefused."""
        with jvm_of(self._spark) as jvm:
            system, file = self._hadoop(jvm, f"{self.uri}/{name}")
            stream = system.create(file, True)
            try:
                stream.write(bytearray(text.encode()))
            finally:
                stream.close()

    def _hadoop(self, jvm: Any, path: str) -> tuple[Any, Any]:
        """Return the file system and the path as Hadoop objects."""
        file = jvm.org.apache.hadoop.fs.Path(path)
        return file.getFileSystem(self._spark._jsparkSession.sessionState().newHadoopConf()), file

    def _read_hadoop(self, jvm: Any, path: str) -> list[str] | None:
        from py4j.protocol import Py4JJavaError

        system, file = self._hadoop(jvm, path)
        try:
            stream = system.open(file)
        except Py4JJavaError as error:
            if error.java_exception.getClass().getName() == "java.io.FileNotFoundException":
                return None
            raise
        try:
            text: str = jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
        finally:
            stream.close()
        return text.splitlines()

    def _read_by_job(self, name: str) -> list[str] | None:
        """Read with a Spark job, in sessions that do not let Python call Hadoop's classes."""
        from pyspark.errors import AnalysisException

        try:
            rows = self._spark.read.text(f"{self.uri}/{name}", wholetext=True).collect()
        except AnalysisException as error:
            if error.getCondition() == "PATH_NOT_FOUND":
                return None
            raise
        return _lines(line for row in rows for line in row[0].splitlines())


def _local_path(uri: str) -> str | None:
    """Return the path of a ``file:`` URI, else None. Spark takes the path literally, so ``%20`` is not a space."""
    if not uri.startswith("file:"):
        return None
    path = uri.removeprefix("file:")
    if path.startswith("//"):
        path = "/" + path[2:].partition("/")[2]
    return path


def _lines(lines: Iterable[str]) -> list[str]:
    # Kafka's initial offsets begin with a NUL for compatibility with Spark 2.1
    return [line.strip("\0") for line in lines if line.strip("\0 ")]
