"""Spark's checkpoint location: the user's, on any file system that Spark supports, or a query's own.

The checkpoint on Kafka says where a query continues, so what Spark keeps in the location need not outlive the query. A
query without the option ``checkpointLocation`` therefore has a location of its own, in memory if the system has a file
system for that: new at each start, and removed when the query ends or, after a crash, by the next start.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_integration.sessions import JvmRefused, changed, jvm_of, set_or_unset
from statemgr.errors import CorruptRecord

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


log = logging.getLogger(__name__)
#: Files in memory on Linux. Containers often limit it to 64 MB.
_MEMORY = Path("/dev/shm")
#: Free bytes that a location in memory needs: Spark keeps 100 batches, each with a text of all input offsets, twice.
_MEMORY_BYTES = 32 * 1024 * 1024
#: A setting for the start of a query with its own location: Hadoop then writes no file of checksums next to each file
#: of Spark's logs.
_WITHOUT_CHECKSUMS = ("fs.AbstractFileSystem.file.impl", "org.apache.hadoop.fs.local.RawLocalFs")
#: Another one, which makes Spark's logs plain files. Without its native library, Hadoop starts a process (chmod) for
#: each file that it creates, and no setting of its own avoids that. A batch writes two, and waits for each.
_MANAGER = ("spark.sql.streaming.checkpointFileManagerClass", "statemgr.PlainFiles")
#: Held while these are set. Another start would take them for the user's, and set them again at its end.
_changing = threading.RLock()
_PLAIN_FILES = """
package statemgr;

import java.io.FileOutputStream;
import java.io.IOException;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.Path;
import org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager;

public class PlainFiles extends FileSystemBasedCheckpointFileManager {
    public PlainFiles(Path path, Configuration settings) {
        super(path, settings);
    }

    public FSDataOutputStream createTempFile(Path path) {
        if (!"file".equals(path.toUri().getScheme())) {
            return super.createTempFile(path);
        }
        try {
            return new FSDataOutputStream(new FileOutputStream(path.toUri().getPath()), null);
        } catch (IOException error) {
            throw new RuntimeException(error);
        }
    }
}
"""


def own_locations() -> tuple[Path, Path]:
    """Return the directory below which this user's queries have their own locations, and the one above it that is
    shared with other users: in memory, or else the system's directory for temporary files.
    """
    base = Path(tempfile.gettempdir())
    if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK | os.X_OK):
        found = os.statvfs(_MEMORY)
        base = _MEMORY if found.f_bavail * found.f_frsize >= _MEMORY_BYTES else base
    return base / f"statemgr-{os.getuid()}" / "locations", base


class Location:
    """A checkpoint location.

    Args:
        uri: the location as it is passed to Spark.
        kept: whether it is the user's, and outlives the query.
    """

    def __init__(self, spark: SparkSession, uri: str, *, kept: bool = True) -> None:
        self._spark: Any = spark
        self.uri = uri.rstrip("/")
        self.kept = kept

    @contextmanager
    def quick(self) -> Iterator[None]:
        """A block in which a query is started. If the location is the query's own, Spark writes its logs faster.
        Waits for other starts."""
        with _changing, ExitStack() as settings:
            if not self.kept:
                settings.enter_context(changed(self._spark, *_WITHOUT_CHECKSUMS))
                if settings.enter_context(_with_plain_files(self._spark)):
                    settings.enter_context(changed(self._spark, *_MANAGER))
            yield

    def forget_quick(self, session: SparkSession) -> None:
        """Take the class of Spark's logs, which are open now, from a query's own copy of the session: what the user's
        code writes there is not in this location."""
        name, value = _MANAGER
        if not self.kept and session.conf.get(name, None) == value:
            with _changing:
                set_or_unset(session, name, self._spark.conf.get(name, None))

    @property
    def is_local(self) -> bool:
        """Whether Python reads it from a file system."""
        return _local_path(self.uri) is not None

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


@contextmanager
def _with_plain_files(session: Any) -> Iterator[bool]:
    """A block in which this thread's calls find the Java class :data:`_PLAIN_FILES`, which Spark's own compiler of
    generated code (Janino) compiles. Yields whether it is there; if not, Spark does without."""
    from py4j.clientserver import ClientServer
    from py4j.protocol import Py4JError

    with ExitStack() as undone:
        try:
            with jvm_of(session) as jvm:
                if not isinstance(getattr(session.sparkContext, "_gateway", None), ClientServer):
                    raise JvmRefused("the next call may be on another thread of the JVM")
                thread = jvm.java.lang.Thread.currentThread()
                before = thread.getContextClassLoader()
                compiler = jvm.org.codehaus.janino.SimpleCompiler()
                compiler.setParentClassLoader(before)
                compiler.cook(_PLAIN_FILES)
                undone.callback(thread.setContextClassLoader, before)
                thread.setContextClassLoader(compiler.getClassLoader())
            is_there = True
        except (JvmRefused, Py4JError) as error:
            log.info("Spark's logs are written with Hadoop's own files: %s", error)
            is_there = False
        yield is_there


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
