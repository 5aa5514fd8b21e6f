"""Fetches jars from Maven Central with the Apache Ivy that PySpark contains.

Writes only below the user's cache directory. Two processes may fetch the same jars at once: each downloads into its own
directory, and the first rename wins. Jars in the cache are used without starting Java.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from statemgr.cli.java import find_java
from statemgr.errors import MissingError, PrerequisiteMissing, UnavailableError

#: The broker's version.
KAFKA_VERSION = "4.3.1"

_RESOLVE_DEADLINE_S = 600
_SPARK_HINT = "pip install 'statemgr[spark]'"


@dataclass(frozen=True)
class Artifact:
    """A module of Maven Central: organisation, name, revision."""

    organisation: str
    name: str
    revision: str

    def __str__(self) -> str:
        return f"{self.organisation}:{self.name}:{self.revision}"


BROKER = Artifact("org.apache.kafka", "kafka_2.13", KAFKA_VERSION)
#: The broker's dependencies have no logger. Without this one its log would be empty.
_LOGGER = Artifact("org.slf4j", "slf4j-simple", "1.7.36")
_KAFKA_CLIENTS = Artifact("org.apache.kafka", "kafka-clients", "3.9.1")
_COMMONS_POOL = Artifact("org.apache.commons", "commons-pool2", "2.12.1")
#: The newest token provider that every mirror has.
_TOKEN_PROVIDER_FALLBACK = "4.0.0"


def cache_directory() -> Path:
    """The directory that keeps jars and built servers between runs."""
    return Path(platformdirs.user_cache_dir("statemgr", appauthor=False))


def broker_jars(cache: Path | None = None) -> list[Path]:
    """The broker's jars and their dependencies, fetched at the first call (46 files, 44 MB).

    Raises:
        PrerequisiteMissing: no Java, or no PySpark (whose Ivy resolves).
        UnavailableError: the repository could not be reached.
        MissingError: the repository does not have an artifact.
    """
    return _jars(BROKER, transitive=True, cache=cache) + _jars(_LOGGER, transitive=False, cache=cache)


def connector_jars(cache: Path | None = None) -> list[Path]:
    """The jars of Spark's Kafka connector for the installed PySpark, to be passed as ``spark.jars``.

    They are fetched one by one, because some mirrors lack newer token providers, and then Ivy cannot resolve the
    connector's own list of dependencies. The newest available token provider is used. If there is no connector for a
    patch release yet, the one for the first release of the minor version is used, which is compatible.

    Raises:
        As :func:`broker_jars`.
    """
    version = pyspark_version()
    first = ".".join([*version.split(".")[:2], "0"])
    jars = _newest("spark-sql-kafka-0-10_2.13", (version, first), cache)
    jars += _newest("spark-token-provider-kafka-0-10_2.13", (version, _TOKEN_PROVIDER_FALLBACK), cache)
    for artifact in (_KAFKA_CLIENTS, _COMMONS_POOL):
        jars += _jars(artifact, transitive=False, cache=cache)
    return jars


def pyspark_version() -> str:
    """The version of the installed PySpark, found without importing it.

    Raises:
        PrerequisiteMissing: PySpark is not installed.
    """
    try:
        return importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError as error:
        raise PrerequisiteMissing("PySpark is not installed", hint=_SPARK_HINT) from error


def _newest(name: str, revisions: tuple[str, ...], cache: Path | None) -> list[Path]:
    """The first available of these revisions of a Spark artifact. One in the cache is preferred."""
    candidates = [Artifact("org.apache.spark", name, revision) for revision in dict.fromkeys(revisions)]
    for artifact in candidates:
        if found := _cached(artifact, cache):
            return found
    for artifact in candidates[:-1]:
        try:
            return _jars(artifact, transitive=False, cache=cache)
        except MissingError:
            continue
    return _jars(candidates[-1], transitive=False, cache=cache)


def _jars(artifact: Artifact, *, transitive: bool, cache: Path | None) -> list[Path]:
    found = _cached(artifact, cache)
    if found:
        return found
    root = cache or cache_directory()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix="resolve-") as work:
        target = Path(work, "jars")
        target.mkdir()
        _resolve(artifact, transitive=transitive, ivy_cache=Path(work, "ivy"), target=target)
        destination = _directory_of(artifact, cache)
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(target, destination)
        except OSError:
            # another process was first, with the same jars
            if not destination.is_dir():
                raise
    return _cached(artifact, cache)


def _directory_of(artifact: Artifact, cache: Path | None) -> Path:
    return (cache or cache_directory()) / "jars" / f"{artifact.organisation}.{artifact.name}-{artifact.revision}"


def _cached(artifact: Artifact, cache: Path | None) -> list[Path]:
    return sorted(_directory_of(artifact, cache).glob("*.jar"))


def _ivy_jar() -> Path:
    spec = importlib.util.find_spec("pyspark")
    locations = (spec.submodule_search_locations if spec else None) or []
    for location in locations:
        for jar in sorted(Path(location, "jars").glob("ivy-*.jar")):
            return jar
    raise PrerequisiteMissing("PySpark, whose Ivy fetches jars, is not installed", hint=_SPARK_HINT)


def _resolve(artifact: Artifact, *, transitive: bool, ivy_cache: Path, target: Path) -> None:
    command = [str(find_java().program), "-jar", str(_ivy_jar()), "-cache", str(ivy_cache)]
    command += ["-dependency", artifact.organisation, artifact.name, artifact.revision, "-confs", "default"]
    command += ["-types", "jar", "bundle", "-retrieve", f"{target}/[artifact]-[revision].[ext]"]
    if not transitive:
        command.append("-notransitive")
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_RESOLVE_DEADLINE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise _unreachable(artifact) from error
    shutil.rmtree(ivy_cache, ignore_errors=True)
    output = run.stdout + run.stderr
    if run.returncode == 0 and any(target.glob("*.jar")) and "UNRESOLVED DEPENDENCIES" not in output:
        return
    network = (
        "UnknownHostException",
        "ConnectException",
        "SocketTimeout",
        "Host ",
        "NoRouteToHost",
        "SSLHandshake",
    )
    if any(word in output for word in network):
        raise _unreachable(artifact)
    raise MissingError("the jar was not found in Maven Central or its mirror", artifact=str(artifact))


def _unreachable(artifact: Artifact) -> UnavailableError:
    return UnavailableError(
        "Maven Central could not be reached",
        hint="check the network, or Java's proxy settings in JAVA_TOOL_OPTIONS (-Dhttps.proxyHost=...)",
        artifact=str(artifact),
    )
