from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from statemgr.errors import MissingError, PrerequisiteMissing, UnavailableError
from statemgr_tools.dev import jars
from statemgr_tools.dev.jars import Artifact

ARTIFACT = Artifact("org.example", "thing", "1.0")


def test_two_that_resolve_at_once_leave_one_whole_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both get the same jars, whichever renames its directory first, and no working directory is left."""
    both_are_there = threading.Barrier(2, timeout=20)

    def resolve(artifact: Artifact, *, target: Path, **_: Any) -> None:
        (target / "thing-1.0.jar").write_bytes(b"jar")
        both_are_there.wait()

    monkeypatch.setattr(jars, "_resolve", resolve)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: jars._jars(ARTIFACT, transitive=False, cache=tmp_path), range(2)))
    assert found[0] == found[1] == [tmp_path / "jars" / "org.example.thing-1.0" / "thing-1.0.jar"]
    assert [path.name for path in tmp_path.iterdir()] == ["jars"]


def test_a_failed_resolve_leaves_nothing_that_looks_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache never holds a partial set of jars, which would keep the broker from starting."""

    def resolve(artifact: Artifact, *, target: Path, **_: Any) -> None:
        (target / "half.jar").write_bytes(b"jar")
        raise UnavailableError("cut off")

    monkeypatch.setattr(jars, "_resolve", resolve)
    with pytest.raises(UnavailableError):
        jars._jars(ARTIFACT, transitive=True, cache=tmp_path)
    assert list(tmp_path.rglob("*.jar")) == []


def test_a_repository_that_cannot_be_reached_is_told_from_a_missing_jar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real Ivy with an unreachable proxy reports that Maven Central cannot be reached, and leaves the cache empty."""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=9")
    with pytest.raises(UnavailableError, match="Maven Central could not be reached"):
        jars._jars(ARTIFACT, transitive=False, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_absent_token_provider_falls_back_to_the_one_that_every_mirror_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connector's own version is tried first. The four jars come back in the order of the classpath."""
    asked: list[str] = []

    def resolve(artifact: Artifact, *, target: Path, **_: Any) -> None:
        asked.append(f"{artifact.name}-{artifact.revision}")
        if artifact.name.startswith("spark-token-provider") and artifact.revision != "4.0.0":
            raise MissingError("not there")
        (target / f"{artifact.name}-{artifact.revision}.jar").write_bytes(b"jar")

    monkeypatch.setattr(jars, "_resolve", resolve)
    version = jars.pyspark_version()
    names = [jar.name for jar in jars.connector_jars(tmp_path)]
    assert names == [
        f"spark-sql-kafka-0-10_2.13-{version}.jar",
        "spark-token-provider-kafka-0-10_2.13-4.0.0.jar",
        "kafka-clients-3.9.1.jar",
        "commons-pool2-2.12.1.jar",
    ]
    assert asked[1] == f"spark-token-provider-kafka-0-10_2.13-{version}"
    asked.clear()
    jars.connector_jars(tmp_path)
    assert asked == [], "all from the cache"


def test_a_patch_release_without_a_connector_takes_the_minor_versions_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PySpark release that is newer than the mirror's connectors still reads Kafka."""

    def resolve(artifact: Artifact, *, target: Path, **_: Any) -> None:
        if artifact.revision == "4.2.7":
            raise MissingError("not there")
        (target / f"{artifact.name}-{artifact.revision}.jar").write_bytes(b"jar")

    monkeypatch.setattr(jars, "_resolve", resolve)
    monkeypatch.setattr(jars, "pyspark_version", lambda: "4.2.7")
    assert jars.connector_jars(tmp_path)[0].name == "spark-sql-kafka-0-10_2.13-4.2.0.jar"


@pytest.mark.long
def test_without_pyspark_maven_fetches_the_same_jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real Maven, with this user's settings, fetches an artifact alone or with its runtime dependencies."""
    if shutil.which("mvn") is None:
        pytest.skip("Maven is not here")
    monkeypatch.setattr(jars, "_ivy_jar", lambda: None)
    logger = Artifact("org.slf4j", "slf4j-simple", "1.7.36")
    assert [jar.name for jar in jars._jars(logger, transitive=False, cache=tmp_path / "alone")] == [
        "slf4j-simple-1.7.36.jar"
    ]
    assert [jar.name for jar in jars._jars(logger, transitive=True, cache=tmp_path / "all")] == [
        "slf4j-api-1.7.36.jar",
        "slf4j-simple-1.7.36.jar",
    ]
    with pytest.raises(MissingError, match="not found"):
        jars._jars(ARTIFACT, transitive=False, cache=tmp_path / "absent")


def test_where_nothing_can_fetch_jars_the_error_names_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint names Maven, PySpark, an installed Kafka and Docker."""
    monkeypatch.setattr(jars, "_ivy_jar", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PrerequisiteMissing) as error:
        jars._jars(ARTIFACT, transitive=True, cache=tmp_path)
    for way in ("install Maven", "pip install 'statemgr[spark]'", "KAFKA_HOME", "docker-compose.yml"):
        assert way in (error.value.hint or "")


@pytest.mark.parametrize("jar", [None, "kafka_2.13-3.9.1.jar"])
def test_a_home_without_a_recent_kafka_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jar: str | None
) -> None:
    """A wrong KAFKA_HOME is an error, as a wrong JAVA_HOME is."""
    (tmp_path / "libs").mkdir()
    if jar:
        (tmp_path / "libs" / jar).touch()
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path))
    with pytest.raises(PrerequisiteMissing, match="KAFKA_HOME") as error:
        jars.broker_jars()
    assert "Kafka 4" in (error.value.hint or "")
