"""Find a Java that can run Kafka and Spark. Runs ``java -version`` and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from statemgr.errors import PrerequisiteMissing

#: Spark 4 and Kafka 4 need at least this one.
MINIMUM_VERSION = 17

_HINT = (
    f"install Java {MINIMUM_VERSION} "
    "(Debian: apt install openjdk-17-jre-headless; macOS: brew install openjdk@17) or set JAVA_HOME"
)
_DEADLINE_S = 30


@dataclass(frozen=True, kw_only=True)
class Java:
    """A Java that runs: its program and its major version."""

    program: Path
    version: int


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """Find Java: the one in ``JAVA_HOME`` if that is set, otherwise the one on ``PATH``.

    The program is really run: macOS ships a stub on ``PATH`` that only says that there is no Java.

    Raises:
        PrerequisiteMissing: there is none, it does not run, or it is older than 17.
    """
    environment = os.environ if environment is None else environment
    home = environment.get("JAVA_HOME")
    if home:
        program = Path(home, "bin", "java")
        if not program.is_file():
            raise PrerequisiteMissing("JAVA_HOME has no bin/java", hint=_HINT, java_home=home)
    else:
        found = shutil.which("java", path=environment.get("PATH"))
        if found is None:
            raise PrerequisiteMissing("Java was not found", hint=_HINT)
        program = Path(found)
    version = _version_of(program)
    if version < MINIMUM_VERSION:
        raise PrerequisiteMissing(
            f"Java {version} is too old: version {MINIMUM_VERSION} or newer is needed",
            hint=_HINT,
            program=str(program),
        )
    return Java(program=program, version=version)


def _version_of(program: Path) -> int:
    try:
        run = subprocess.run(
            [str(program), "-version"], capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrerequisiteMissing("Java does not run", hint=_HINT, program=str(program)) from error
    match = re.search(r'version "(\d+)(?:\.(\d+))?', run.stderr + run.stdout)
    if run.returncode != 0 or match is None:
        raise PrerequisiteMissing("Java does not run", hint=_HINT, program=str(program))
    major = int(match.group(1))
    # Java 8 and older call themselves 1.8
    return int(match.group(2) or 0) if major == 1 else major
