"""This machine: Java, and the disk that the stores are on. Runs ``java -version``, writes one small file."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from statemgr.cli.checks.finding import Finding, Status, guarded
from statemgr.cli.java import find_java
from statemgr.config import JobConfig

#: Less free space than this is worth a note: a checkpoint hard-links, but compaction needs room.
_LITTLE_SPACE = 1024**3
_NO_SPACE = 64 * 1024**2


def check_java() -> list[Finding]:
    """Java 17 is needed by Spark and by the local broker, and by nothing else."""
    findings: list[Finding] = []
    needed = importlib.util.find_spec("pyspark") is not None
    with guarded("java", findings):
        java = find_java()
        detail = f"Java {java.version} at {java.program}"
        findings.append(Finding(check="java", status=Status.OK, detail=detail))
    if needed:
        return findings
    return [
        Finding(check=f.check, status=Status.NOTE, detail=f"{f.detail} (only Spark needs it)", fix=f.fix)
        if f.status is Status.PROBLEM
        else f
        for f in findings
    ]


def check_disk(config: JobConfig) -> list[Finding]:
    """The state directory: can be written to, can hold hard links, and has room."""
    findings: list[Finding] = []
    with guarded("disk", findings):
        directory = config.state_dir
        try:
            links = _try(directory)
            free = shutil.disk_usage(directory).free
        except OSError as error:
            reason = f"{directory}: {error.strerror or type(error).__name__}"
            fix = "let this user write to the directory, or set state.dir to another one"
            return [Finding(check="disk", status=Status.PROBLEM, detail=reason, fix=fix)]
        room = f"{free // 1024**2:,} MiB free in {directory}"
        status = Status.OK if free >= _LITTLE_SPACE else Status.NOTE if free >= _NO_SPACE else Status.PROBLEM
        advice = None if status is Status.OK else "free space, or set state.dir to a larger disk"
        findings.append(Finding(check="disk", status=status, detail=room, fix=advice))
        if not links:
            findings.append(
                Finding(
                    check="disk",
                    status=Status.NOTE,
                    detail=f"{directory} does not support hard links: every checkpoint copies the whole store",
                    fix="set state.dir to a directory on a local file system",
                )
            )
    return findings


def _try(directory: Path) -> bool:
    """Write, sync and link a file. Returns whether links work. Raises: OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as temporary:
        file = Path(temporary, "file")
        with file.open("wb") as out:
            out.write(b"x" * 4096)
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(file, Path(temporary, "link"))
        except OSError:
            return False
        return True
