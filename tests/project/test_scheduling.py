"""A run outlives a worker that dies: all other tests run, and the test that it died in fails or runs once more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]

_CONFTEST = """
from tests.scheduling import OutlivingScheduling

def pytest_xdist_make_scheduler(config, log):
    return OutlivingScheduling(config, log)
"""

_TESTS = """
import os, signal, time
from pathlib import Path
import pytest

@pytest.mark.xdist_group("dies")
@pytest.mark.parametrize("number", range(6))
def test_group(number):
    if number == {dies} and not Path("died").exists():
        Path("died").touch()
        time.sleep(0.5)  # the worker tells how often a test may run, and waits for no answer
        os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.parametrize("number", range(12))
def test_alone(number):
    pass
"""


@pytest.mark.parametrize(("dies", "reruns", "workers"), [(0, 0, 1), (3, 1, 2), (5, 1, 1), (5, 0, 2)])
def test_a_worker_dies(tmp_path: Path, dies: int, reruns: int, workers: int) -> None:
    """SIGSEGV at the first, a middle or the last test of a group, with another worker and without."""
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_dying.py").write_text(_TESTS.format(dies=dies))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command += ["-p", "xdist", "-p", "pytest_rerunfailures"]
    command += ["-n", str(workers), "--dist", "loadgroup", "--max-worker-restart=2", f"--reruns={reruns}"]
    # other plug-ins take longer to load than these tests take
    environment = {"PYTHONPATH": str(_ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == (0 if reruns else 1), done.stdout
    ended = done.stdout.splitlines()[-1]
    assert ("18 passed" if reruns else "1 failed, 17 passed") in ended, done.stdout
    assert ("1 rerun" in ended) == bool(reruns)
