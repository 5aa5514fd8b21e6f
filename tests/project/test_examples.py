"""The examples run with the real software whose jobs they adopt."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from examples.steps import Example
from tests.peers.environments import kept
from tests.servers import KafkaServer

pytestmark = [pytest.mark.integration, pytest.mark.long]
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def example(kafka: KafkaServer, name: str, *arguments: str, program: str = "run.py") -> Iterator[str]:
    """Run an example. Yields its output; its directory stays until the block ends."""
    if name in ("from-kafka-streams", "from-samza") and shutil.which("mvn") is None:
        pytest.skip("needs Maven")
    with kept(f"example-{name}") as directory:
        common = ["--broker", kafka.bootstrap_servers, "--directory", str(directory)]
        ran = subprocess.run(
            [sys.executable, f"examples/{name}/{program}", *common, *arguments],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
        yield ran.stdout


@pytest.mark.parametrize("name", ["from-quix", "from-kafka-streams", "from-samza"])
def test_an_example_ends_with_known_totals(kafka: KafkaServer, name: str) -> None:
    """The old job counts the first half of the rows and the new job the second half. No row is lost or counted
    twice."""
    with example(kafka, name) as printed:
        assert "50 keys, and each has counted 20 rows" in printed


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["from-quix", "from-kafka-streams"])
def test_a_windowed_example_ends_with_known_totals(kafka: KafkaServer, name: str) -> None:
    """The windows of the old job go on in the new one."""
    with example(kafka, name, program="run_windows.py") as printed:
        assert "50 keys, and each has counted 20 rows" in printed


def test_a_query_of_spark_moves_here_and_back(kafka: KafkaServer) -> None:
    """The query runs on Spark's engine, on statemgr and on Spark's engine again. No row is lost or counted twice."""
    with example(kafka, "from-transform-with-state") as printed:
        assert "50 keys, and each has counted 30 rows" in printed


def test_a_build_that_was_interrupted_begins_again(tmp_path: Path) -> None:
    """A directory has its name only when it is complete, and then it is used again."""
    example = Example.__new__(Example)
    example.directory = tmp_path

    def build(made: Path, fails: bool = False) -> None:
        made.mkdir()
        (made / f"file-{fails}").touch()
        if fails:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        example._built("java", partial(build, fails=True))
    for _ in range(2):
        assert [path.name for path in example._built("java", build).iterdir()] == ["file-False"]
