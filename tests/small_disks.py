"""File systems of a few MiB, and files that fill them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(directory: Path, options: str) -> Iterator[None]:
    """Mount a file system in memory at a new directory. Skips the test where that is not possible."""
    directory.mkdir(parents=True)
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux's tmpfs")
    command = [mount, "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip(f"mounting a small file system needs root: {run.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run([umount, "--lazy", str(directory)], check=True)


def fill(ballast: Path, leave: int = 0) -> None:
    """Write a file until its file system is full but for some bytes."""
    with ballast.open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(65_536))
        if leave:
            file.truncate(max(file.tell() - leave, 0))
