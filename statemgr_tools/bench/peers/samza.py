"""Apache Samza's blob-store backup and restore, measured by its harness on the same files and the same S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from statemgr.cli.java import find_java
from statemgr_tools.bench.addresses import S3Address
from statemgr_tools.bench.peers.peer import Peer

#: As many as the product has; Samza's own default for one task is two.
_THREADS = 8


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
        """Use it with a bucket of its own, which is emptied."""
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
        """An operation whose result does not matter."""
        self._samza.run(self._command(operation, *arguments), self._environment)

    def measure(self, operation: str, *arguments: str | Path) -> dict[str, Any]:
        """An operation, and what it printed: ``full``, ``commit`` or ``restore``, see the harness's README."""
        return self._samza.measure(self._command(operation, *arguments), self._environment)

    def _command(self, operation: str, *arguments: str | Path) -> list[str | Path]:
        return [find_java().program, "-Xmx1g", "-cp", self._classes, "bench.Bench", operation, *arguments]


def requests(printed: dict[str, Any]) -> int:
    """How many requests an operation made: of every kind, also for tags and deletes."""
    return sum(int(printed[kind]) for kind in ("puts", "gets", "deletes", "removeTTL"))
