"""The Python versions that statemgr supports, and a smoke test on each other one that this machine has.

``scripts/pythons.py [--quick]`` makes an environment ``.venv-3.X`` for each version but its own, and runs a part of the
tests there: unit tests, a task on a real broker, and the five minutes of the README. ``--quick`` runs those of jobs in
memory only. A version that is missing here is named. Exit status 1 if a test fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: What `requires-python` allows and python.org supports, oldest first.
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
#: What depends on Python or on a compiled package: threads, RocksDB, Kafka's client, codecs, and jobs in memory.
_QUICK = [
    *(f"tests/core/unit/test_{name}.py" for name in ("blob_reading", "codec", "config", "job_tester", "kafka_clients")),
    *(f"tests/core/unit/test_{name}.py" for name in ("local_rocksdb", "many_tasks", "open_tasks", "serdes", "worker")),
    "tests/tools/test_demo_tiny.py",
]
_ALL = [
    "tests/core/unit",
    "tests/core/integration/test_task.py",
    "tests/docs/test_quickstart.py::test_the_five_minutes_of_the_readme",
    "tests/tools/test_demo_tiny.py",
]


def interpreters() -> dict[str, Path]:
    """Version → an interpreter of this machine, from PATH or pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for version in VERSIONS:
        on_path = shutil.which(f"python{version}")
        places = [sys.executable, on_path, *sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
        works = next((Path(place) for place in places if place and _version(place) == version), None)
        if works is not None:
            found[version] = works
    return found


def _version(python: str | Path) -> str | None:
    """The version of an interpreter; None for a shim of pyenv that leads nowhere."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    asked = subprocess.run([python, "-c", code], check=False, capture_output=True, text=True)
    return asked.stdout.strip() if asked.returncode == 0 else None


def main() -> int:
    """Returns: the exit status."""
    parser = argparse.ArgumentParser(description="Run smoke tests on each other Python of this machine.")
    parser.add_argument("--quick", action="store_true", help="only the tests that need no server")
    quick = parser.parse_args().quick
    here, own, failed = interpreters(), ".".join(map(str, sys.version_info[:2])), []
    for version in VERSIONS:
        if version == own:
            continue
        if version not in here:
            print(f"SKIPPED Python {version}: this machine has none", flush=True)
            continue
        print(f"Python {version}: {here[version]}", flush=True)
        if not _passes(version, here[version], quick):
            failed.append(version)
    if failed:
        print(f"FAILED on Python {', '.join(failed)}")
    return 1 if failed else 0


def _passes(version: str, python: Path, quick: bool) -> bool:
    made = ROOT / f".venv-{version}"
    uv = [sys.executable, "-m", "uv"]
    install = [*uv, "pip", "install", "--quiet", "--python", str(made), "-c", str(ROOT / "constraints.txt")]
    tests, chosen = (_QUICK, "not long and not heavy") if quick else (_ALL, "not heavy")
    commands = [
        [*uv, "venv", "--quiet", "--allow-existing", "--python", str(python), str(made)],
        [*install, "-e", f"{ROOT}[test]"],
        [str(made / "bin" / "python"), "-m", "pytest", "-q", "-n", "2", "-m", chosen, *tests],
    ]
    return all(subprocess.run(command, cwd=ROOT, check=False).returncode == 0 for command in commands)


if __name__ == "__main__":
    sys.exit(main())
