from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from statemgr.errors import MissingError, UnavailableError
from statemgr_tools.dev import jars
from statemgr_tools.dev.jars import Artifact

ARTIFACT = Artifact("org.example", "thing", "1.0")


def test_two_that_resolve_at_once_leave_one_whole_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both get the same jars, whoever renames first, and no working directory stays behind."""
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
    """Half of the jars in the cache would be a broker that does not start, for ever."""

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
    """Real Ivy behind a proxy that is not there: a network problem with a hint, and nothing in the cache."""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=9")
    with pytest.raises(UnavailableError, match="Maven Central could not be reached"):
        jars._jars(ARTIFACT, transitive=False, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_absent_token_provider_falls_back_to_the_one_that_every_mirror_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connector's own version is tried first; four jars come back, in the order of the classpath."""
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
    """A PySpark that is newer than what a mirror has of the connector still reads Kafka."""

    def resolve(artifact: Artifact, *, target: Path, **_: Any) -> None:
        if artifact.revision == "4.2.7":
            raise MissingError("not there")
        (target / f"{artifact.name}-{artifact.revision}.jar").write_bytes(b"jar")

    monkeypatch.setattr(jars, "_resolve", resolve)
    monkeypatch.setattr(jars, "pyspark_version", lambda: "4.2.7")
    assert jars.connector_jars(tmp_path)[0].name == "spark-sql-kafka-0-10_2.13-4.2.0.jar"
