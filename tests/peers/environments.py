"""Builds the environments of the real peers, once for all tests of a run. Starts processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from tests.servers import run_directory

HERE = Path(__file__).parent
_QUIX = "quixstreams==3.28.1"
_DEADLINE_S = 600


def quix_python() -> Path:
    """Return a Python with Quix Streams. Skip the test if it cannot be installed here."""

    def build(directory: Path) -> None:
        _run(sys.executable, "-m", "venv", directory)
        _run(directory / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", _QUIX)

    return _made("quix", build) / "bin" / "python"


def streams_java(program: str) -> list[str | Path]:
    """Return the start of a command line: Java with Kafka Streams, and a program compiled from this folder.

    Maven downloads the libraries that the peer harness names. The test is skipped if there is no harness or the build
    fails.
    """
    harness = HERE.parents[2] / "shared" / "peers" / "kafka" / "ks" / "pom.xml"
    if not harness.exists():
        pytest.skip(f"needs the harness of Kafka Streams in {harness.parent}")

    def build(directory: Path) -> None:
        libraries = f"-DoutputDirectory={directory / 'lib'}"
        _run("mvn", "-q", "-B", "-f", harness, "dependency:copy-dependencies", libraries)
        _run("javac", "-cp", f"{directory / 'lib'}/*", "-d", directory / "classes", *HERE.glob("Streams*.java"))

    made = _made("streams", build)
    return ["java", "-Xmx256m", "-cp", f"{made / 'classes'}:{made / 'lib'}/*", program]


def samza_java(program: str = "Counts") -> list[str | Path]:
    """Return the start of a command line: Java with Apache Samza and a job, which takes a properties file: that of the
    example, or one of this folder.

    Maven downloads the libraries that the example names. The test is skipped if the build fails.
    """
    example = HERE.parents[1] / "examples" / "from-samza"

    def build(directory: Path) -> None:
        libraries = f"-DoutputDirectory={directory / 'lib'}"
        _run("mvn", "-q", "-B", "-f", example / "pom.xml", "dependency:copy-dependencies", libraries)
        sources = [*(example / "src" / "main" / "java").glob("*.java"), *HERE.glob("Samza*.java")]
        _run("javac", "-cp", f"{directory / 'lib'}/*", "-d", directory / "classes", *sources)

    made = _made("samza", build)
    path = [made / "classes", example / "src" / "main" / "resources", made / "lib" / "*"]
    return ["java", "-Xmx256m", "-cp", ":".join(map(str, path)), program]


@contextmanager
def kept(name: str) -> Iterator[Path]:
    """Yield a directory that lives as long as the environments, for one test at a time."""
    root = _root()
    with FileLock(root / f"{name}.lock"):
        yield root / name


def run(command: Sequence[str | Path], *, status: int = 0) -> str:
    """Run a peer's program to its end. Return what it printed."""
    texts = [str(part) for part in command]
    ran = subprocess.run(texts, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert ran.returncode == status, f"{texts}: status {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


def _made(name: str, build: Callable[[Path], None]) -> Path:
    """Return a directory that ``build`` fills once. ``STATEMGR_TEST_PEERS`` keeps directories beyond the run."""
    root = _root()
    directory = root / name
    with FileLock(root / f"{name}.lock"):
        if not (directory / ".built").exists():
            try:
                build(directory)
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or str(error)
                pytest.skip(f"{name} cannot be built here: {said[-300:]}")
            (directory / ".built").touch()
    return directory


def _root() -> Path:
    root = Path(os.environ.get("STATEMGR_TEST_PEERS") or run_directory() / "peers")
    root.mkdir(parents=True, exist_ok=True)
    return root


def _run(*command: str | Path) -> None:
    texts = [str(part) for part in command]
    subprocess.run(texts, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
