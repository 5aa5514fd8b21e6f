"""Programs of other languages that serve as servers: on ``PATH``, or built once in the user's cache directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from statemgr_tools.dev.jars import cache_directory

_BUILD_DEADLINE_S = 600
#: Seconds for a program with hundreds of packages, on a busy machine.
_LONG_BUILD_DEADLINE_S = 3600


def go_program(
    name: str, package: str, version: str, *, build: bool = True, as_dependency: bool = False
) -> Path | None:
    """Return a Go program: on ``PATH``, in ``GOBIN``, in our cache, or built there by Go. None if it cannot be had.

    Args:
        as_dependency: build it as a dependency of an empty module, because ``go install`` refuses modules that replace
            others. That takes minutes.
    """
    if found := shutil.which(name):
        return Path(found)
    kept = cache_directory() / "bin" / f"{name}-{version}"
    for candidate in (Path(os.environ.get("GOBIN") or "/nonexistent", name), kept):
        if os.access(candidate, os.X_OK):
            return candidate
    if not build or (go := shutil.which("go")) is None:
        return None
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix="build-") as work:
        # a static program also runs in an empty container image
        environment = {"GOBIN": work, "CGO_ENABLED": "0", "GOFLAGS": "-trimpath"}
        steps = [[go, "install", f"{package}@{version}"]]
        if as_dependency:
            steps = [
                [go, "mod", "init", "build"],
                [go, "get", f"{package}@{version}"],
                [go, "build", "-o", name, package],
            ]
        deadline_s = _LONG_BUILD_DEADLINE_S if as_dependency else _BUILD_DEADLINE_S
        if not all(_ran(step, Path(work), environment, deadline_s) for step in steps):
            return None  # an old Go or no network
        os.replace(Path(work, name), kept)
    return kept


def npm_program(name: str, package: str, version: str, *, build: bool = True) -> Path | None:
    """Return a program of an npm package: on ``PATH``, in our cache, or installed there. None if it cannot be had."""
    if found := shutil.which(name):
        return Path(found)
    kept = cache_directory() / "npm" / f"{package}-{version}"
    program = kept / "node_modules" / ".bin" / name
    if not program.exists() and build and (npm := shutil.which("npm")):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix="build-") as work:
            # in a directory of its own, which is no package
            into = Path(work) / "new"
            into.mkdir()
            command = [npm, "install", "--prefix", str(into), "--no-audit", "--no-fund", "--ignore-scripts"]
            if _ran([*command, f"{package}@{version}"], into, {}) and not kept.exists():
                os.replace(into, kept)
    return program if program.exists() else None


def _ran(
    command: Sequence[str], directory: Path, environment: Mapping[str, str], deadline_s: int = _BUILD_DEADLINE_S
) -> bool:
    try:
        subprocess.run(
            command,
            env={**os.environ, **environment},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=deadline_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return True
