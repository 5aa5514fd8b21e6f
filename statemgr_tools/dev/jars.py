"""Fetches jars from Maven Central with Maven, or with the Apache Ivy that PySpark contains.

Both take the repository, mirrors and proxies from their own settings. The Kafka installation in ``KAFKA_HOME``, if set,
replaces the broker's jars. Writes only in the user's cache directory. Two processes may fetch the same jars at once:
each downloads into its own directory, and the first rename wins. Jars in the cache need no Java.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from statemgr.errors import MissingError, PrerequisiteMissing, UnavailableError
from statemgr.terminal.find_java import find_java

#: The broker's version.
KAFKA_VERSION = "4.3.1"

_RESOLVE_DEADLINE_S = 600
_SPARK_HINT = "pip install 'statemgr[spark]'"
_HOME = "KAFKA_HOME"
#: Kafka 4 runs without ZooKeeper, and has every property that the broker gets.
_OLDEST_MAJOR = 4
_MAVEN_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"
_POM = """\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>statemgr</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency><groupId>{organisation}</groupId><artifactId>{name}</artifactId><version>{revision}</version></dependency>
  </dependencies>
</project>
"""


@dataclass(frozen=True)
class Artifact:
    """A module of Maven Central: organisation, name, revision."""

    organisation: str
    name: str
    revision: str

    def __str__(self) -> str:
        return f"{self.organisation}:{self.name}:{self.revision}"


BROKER = Artifact("org.apache.kafka", "kafka_2.13", KAFKA_VERSION)
#: The broker's dependencies include no logger. Without this one, its log would be empty.
_LOGGER = Artifact("org.slf4j", "slf4j-simple", "1.7.36")
_KAFKA_CLIENTS = Artifact("org.apache.kafka", "kafka-clients", "3.9.1")
#: The parts of Hadoop's S3 client: without the bundle of all of Amazon's services, which has 600 MB.
_S3A_SDK = Artifact("software.amazon.awssdk", "s3-transfer-manager", "2.35.4")
_S3A_STREAMS = Artifact("software.amazon.s3.analyticsaccelerator", "analyticsaccelerator-s3", "1.3.1")
_COMMONS_POOL = Artifact("org.apache.commons", "commons-pool2", "2.12.1")
#: The newest token provider that all mirrors have.
_TOKEN_PROVIDER_FALLBACK = "4.0.0"


def cache_directory() -> Path:
    """Return the directory that keeps jars and built servers between runs."""
    return Path(platformdirs.user_cache_dir("statemgr", appauthor=False))


def broker_jars(cache: Path | None = None) -> list[Path]:
    """Return the broker's jars and their dependencies from ``KAFKA_HOME``, or fetch them at the first call (44 MB).

    Raises:
        PrerequisiteMissing: neither Maven nor PySpark (whose Ivy resolves) is there; ``KAFKA_HOME`` has no Kafka 4.
        UnavailableError: the repository could not be reached.
        MissingError: the repository does not have an artifact.
    """
    if home := os.environ.get(_HOME):
        return _installed(Path(home))
    return _jars(BROKER, transitive=True, cache=cache) + _jars(_LOGGER, transitive=False, cache=cache)


def broker_jars_are_here() -> bool:
    """Return whether :func:`broker_jars` would fetch nothing."""
    return bool(os.environ.get(_HOME) or (_cached(BROKER, None) and _cached(_LOGGER, None)))


def _installed(home: Path) -> list[Path]:
    """Return the jars of a Kafka installation. Raises: PrerequisiteMissing."""
    hint = f"name the directory of Kafka {_OLDEST_MAJOR} or newer, or unset {_HOME}: then the jars are fetched"
    versions = [re.fullmatch(r"kafka_2\.13-(\d+)\..*\.jar", jar.name) for jar in home.glob("libs/kafka_2.13-*.jar")]
    if not any(versions):
        raise PrerequisiteMissing(f"{_HOME} has no libs/kafka_2.13-*.jar", hint=hint, kafka_home=str(home))
    if max(int(version[1]) for version in versions if version) < _OLDEST_MAJOR:
        raise PrerequisiteMissing(f"the Kafka of {_HOME} is too old", hint=hint, kafka_home=str(home))
    return sorted(home.glob("libs/*.jar"))


def connector_jars(cache: Path | None = None) -> list[Path]:
    """Return the jars of Spark's Kafka connector for the installed PySpark. Pass them as ``spark.jars``.

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


def s3a_jars(cache: Path | None = None) -> list[Path]:
    """Return the jars of Hadoop's S3 file system for the installed PySpark (18 MB). Raises: as :func:`broker_jars`."""
    hadoop = re.fullmatch(r"hadoop-client-api-(.+)\.jar", next(_pyspark_jars("hadoop-client-api-*.jar")).name)
    assert hadoop is not None
    connector = Artifact("org.apache.hadoop", "hadoop-aws", hadoop[1])
    alone = [jar for artifact in (connector, _S3A_STREAMS) for jar in _jars(artifact, transitive=False, cache=cache)]
    return alone + _jars(_S3A_SDK, transitive=True, cache=cache)


def pyspark_version() -> str:
    """Return the version of the installed PySpark, without importing it.

    Raises:
        PrerequisiteMissing: PySpark is not installed.
    """
    try:
        return importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError as error:
        raise PrerequisiteMissing("PySpark is not installed", hint=_SPARK_HINT) from error


def _newest(name: str, revisions: tuple[str, ...], cache: Path | None) -> list[Path]:
    """Return the first available of these revisions of a Spark artifact. Prefer one in the cache."""
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


def _ivy_jar() -> Path | None:
    return next(_pyspark_jars("ivy-*.jar"), None)


def _pyspark_jars(pattern: str) -> Iterator[Path]:
    """Yield the jars that PySpark contains."""
    spec = importlib.util.find_spec("pyspark")
    for location in (spec.submodule_search_locations if spec else None) or []:
        yield from sorted(Path(location, "jars").glob(pattern))


def _resolve(artifact: Artifact, *, transitive: bool, ivy_cache: Path, target: Path) -> None:
    ivy, maven = _ivy_jar(), shutil.which("mvn")
    if ivy is not None:
        command = _ivy_command(ivy, artifact, transitive=transitive, ivy_cache=ivy_cache, target=target)
    elif maven is not None:
        command = _maven_command(maven, artifact, transitive=transitive, target=target)
    else:
        raise PrerequisiteMissing(
            "neither Maven nor PySpark, which fetch jars, is installed",
            hint="install Maven (Debian: apt install maven; macOS: brew install maven), "
            f"or {_SPARK_HINT}, or set {_HOME} to the directory of an installed Kafka; "
            "with Docker, use the docker-compose.yml of `statemgr init --example`",
        )
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
        "Unknown host",
        "Connection refused",
        "timed out",
        "Network is unreachable",
        "No route to host",
        "ConnectException",
        "SocketTimeout",
        "Host ",
        "NoRouteToHost",
        "SSLHandshake",
    )
    if any(word in output for word in network):
        raise _unreachable(artifact)
    raise MissingError("the jar was not found in Maven Central or its mirror", artifact=str(artifact))


def _ivy_command(ivy: Path, artifact: Artifact, *, transitive: bool, ivy_cache: Path, target: Path) -> list[str]:
    command = [str(find_java().program), "-jar", str(ivy), "-cache", str(ivy_cache)]
    command += ["-dependency", artifact.organisation, artifact.name, artifact.revision, "-confs", "default"]
    command += ["-types", "jar", "bundle", "-retrieve", f"{target}/[artifact]-[revision].[ext]"]
    return command if transitive else [*command, "-notransitive"]


def _maven_command(maven: str, artifact: Artifact, *, transitive: bool, target: Path) -> list[str]:
    pom = target.parent / "pom.xml"
    pom.write_text(
        _POM.format(organisation=artifact.organisation, name=artifact.name, revision=artifact.revision),
        encoding="utf-8",
    )
    command = [maven, "--batch-mode", "--file", str(pom), f"{_MAVEN_PLUGIN}:copy-dependencies"]
    return [
        *command,
        f"-DoutputDirectory={target}",
        "-DincludeScope=runtime",
        f"-DexcludeTransitive={str(not transitive).lower()}",
    ]


def _unreachable(artifact: Artifact) -> UnavailableError:
    return UnavailableError(
        "Maven Central could not be reached",
        hint="check the network, or Java's proxy settings in JAVA_TOOL_OPTIONS (-Dhttps.proxyHost=...)",
        artifact=str(artifact),
    )
