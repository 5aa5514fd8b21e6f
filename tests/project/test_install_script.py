from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install.sh"
_OLD = "#!/bin/sh\nexit 1\n"
_WITHOUT_VENV = '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexec {python} "$@"\n'
_SOUND = '#!/bin/sh\nexec {python} "$@"\n'


def _install(tmp_path: Path, python: str | None, **environment: str) -> str:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "grep", "tail", "touch"):
        program = shutil.which(name)
        assert program is not None
        (programs / name).symlink_to(program)
    if python is not None:
        (programs / "python3").write_text(python.format(python=sys.executable))
        (programs / "python3").chmod(0o755)
    for file in ("pyproject.toml", "constraints.txt"):
        shutil.copy(SCRIPT.parents[1] / file, tmp_path)
    run = subprocess.run(
        ["/bin/sh", str(SCRIPT), "venv"],
        env={"PATH": str(programs), "HOME": str(tmp_path), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert not (tmp_path / "venv" / ".installed").exists()
    (line,) = run.stderr.splitlines()
    return line


@pytest.mark.parametrize("python", [None, _OLD])
def test_no_recent_python_is_one_clear_line(tmp_path: Path, python: str | None) -> None:
    """Without Python 3.11 or newer, the line says what to install."""
    assert "Python 3.11 or newer was not found; install it" in _install(tmp_path, python)


def test_a_named_python_that_is_old_or_absent_is_one_clear_line(tmp_path: Path) -> None:
    """If PYTHON names an old or missing program, the script reports that instead of looking for another one."""
    assert "older than Python 3.11" in _install(tmp_path, _OLD, PYTHON="python3")
    shutil.rmtree(tmp_path / "bin")
    assert "not a program" in _install(tmp_path, None, PYTHON="python9")


def test_a_python_without_ensurepip_is_one_clear_line(tmp_path: Path) -> None:
    """Debian's python3 lacks the venv module, so the line names the package to install."""
    assert "apt install python3-venv" in _install(tmp_path, _WITHOUT_VENV)


@pytest.mark.long
def test_no_network_is_one_clear_line(tmp_path: Path) -> None:
    """If the package index is unreachable, the line says so."""
    settings = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    line = _install(tmp_path, _SOUND, PIP_CONFIG_FILE="/dev/null", **settings)
    assert "package index could not be reached" in line
