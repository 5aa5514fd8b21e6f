"""The harnesses of Kafka Streams, Quix Streams and Apache Samza.

They run on the same broker and records, and on the same files and S3 server, as statemgr.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from statemgr.terminal.find_java import find_java
from statemgr_tools.bench import records
from statemgr_tools.bench.addresses import S3Address
from statemgr_tools.bench.peers.peer import Peer

_QUIX = "quixstreams==3.28.1"
_CHECKED_KEYS = 20_000
#: The number of statemgr's threads. Samza's own default for one task is two.
_THREADS = 8


class KafkaStreams(Peer):
    """Restores ``<app>-st-changelog`` with its default settings."""

    def build(self) -> None:
        libraries = self.directory / "lib"
        self.step(
            "mvn", "-q", "-B", "-f", "ks/pom.xml", "dependency:copy-dependencies", f"-DoutputDirectory={libraries}"
        )
        (self.directory / "classes").mkdir(exist_ok=True)
        javac = find_java().program.with_name("javac")
        self.step(javac, "-cp", f"{libraries}/*", "-d", "classes", "ks/RestoreBench.java")

    def restore(self, broker: str, app: str, source: str, count: int, work: Path) -> dict[str, Any]:
        """Restore once in a new process: ``s`` from its start until the store can be read, ``rec_s``."""
        keys = work / f"keys-{count}.txt"
        if not keys.exists():
            step = max(count // _CHECKED_KEYS, 1)
            keys.write_text("\n".join(records.key(number).hex() for number in range(0, count, step)))
        environment = {
            "BENCH_BROKER": broker,
            "BENCH_WORK": str(work),
            "BENCH_KEYS": str(keys),
            "BENCH_KS_APP": app,
            "BENCH_KS_SRC": source,
        }
        classes = f"{self.directory / 'classes'}:{self.directory / 'lib'}/*"
        return self.measure([find_java().program, "-cp", classes, "RestoreBench", "default"], environment)


class Quix(Peer):
    """Restores a changelog, and commits in transactions, with its default settings."""

    @property
    def _python(self) -> Path:
        return self.directory / "venv" / "bin" / "python"

    def build(self) -> None:
        self.step(sys.executable, "-m", "venv", "venv")
        self.step(self._python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", _QUIX)

    def load(self, broker: str, topic: str, count: int, work: Path) -> None:
        """Fill a changelog with the headers that Quix needs (and its own keys and values of the same sizes)."""
        environment = _environment(broker, work) | {"BENCH_N": str(count)}
        self.measure([self._python, "load.py", topic, "quix"], environment)

    def restore(self, broker: str, topic: str, count: int, work: Path) -> dict[str, Any]:
        """Restore once in a new process: ``s`` from its start until the store can be read, ``rec_s``."""
        environment = _environment(broker, work) | {"BENCH_N": str(count), "BENCH_QUIX_TOPIC": topic}
        return self.measure([self._python, "quix_restore.py"], environment)

    def commits(self, broker: str, count: int, each: int, work: Path) -> dict[str, Any]:
        """Make updates to a store and a topic, one transaction per ``each`` updates: ``s`` and ``rec_s``."""
        environment = _environment(broker, work) | {"BENCH_WN": str(count), "BENCH_CP": str(each)}
        return self.measure([self._python, "write_side.py", "quixtx"], environment)


def _environment(broker: str, work: Path) -> dict[str, str]:
    return {"BENCH_BROKER": broker, "BENCH_WORK": str(work)}


class Samza(Peer):
    """The harness around Samza's own classes."""

    def build(self) -> None:
        self.step("mvn", "-q", "-B", "dependency:build-classpath", "-Dmdep.outputFile=cp.txt")
        (self.directory / "classes").mkdir(exist_ok=True)
        sources = sorted(self.directory.glob("src/main/java/bench/*.java"))
        javac = find_java().program.with_name("javac")
        self.step(javac, "-cp", (self.directory / "cp.txt").read_text().strip(), "-d", "classes", *sources)
        for resource in (self.directory / "src/main/resources").iterdir():
            (self.directory / "classes" / resource.name).write_bytes(resource.read_bytes())

    def on(self, s3: S3Address, bucket: str) -> SamzaRun:
        """Return a harness with its own bucket, which is emptied first."""
        run = SamzaRun(self, s3, bucket)
        run.call("wipe")
        return run


class SamzaRun:
    """Samza with one bucket."""

    def __init__(self, samza: Samza, s3: S3Address, bucket: str) -> None:
        self._samza = samza
        self._classes = f"classes:{(samza.directory / 'cp.txt').read_text().strip()}"
        self._environment = {
            "BACKEND": "s3",
            "S3_ENDPOINT": s3.endpoint,
            "S3_BUCKET": bucket,
            "S3_KEY": s3.access_key,
            "S3_SECRET": s3.secret_key,
            "THREADS": str(_THREADS),
        }

    def call(self, operation: str, *arguments: str | Path) -> None:
        """Run an operation without a result."""
        self._samza.run(self._command(operation, *arguments), self._environment)

    def measure(self, operation: str, *arguments: str | Path) -> dict[str, Any]:
        """Run ``full``, ``commit`` or ``restore`` (see the harness's README). Returns: the JSON that it printed."""
        return self._samza.measure(self._command(operation, *arguments), self._environment)

    def _command(self, operation: str, *arguments: str | Path) -> list[str | Path]:
        return [find_java().program, "-Xmx1g", "-cp", self._classes, "bench.Bench", operation, *arguments]


def requests(printed: dict[str, Any]) -> int:
    """Return the number of requests of an operation, including those for tags and deletes."""
    return sum(int(printed[kind]) for kind in ("puts", "gets", "deletes", "removeTTL"))
