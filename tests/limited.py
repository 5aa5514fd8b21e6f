"""Runs a program in a child with little memory, for input that could take all of it or end the process."""

from __future__ import annotations

import subprocess
import sys

#: Sets the limit when the modules are loaded: a program calls it before it reads what is hostile.
_PREFACE = """
import resource, sys
import psutil

def limit(mib=96):
    most = psutil.Process().memory_info().vms + mib * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
"""


def run_limited(program: str, *arguments: str, data: bytes = b"") -> str:
    """Run a program, which calls ``limit(mib)`` itself. Returns: what it prints. Fails if it ends by a signal."""
    child = subprocess.run(
        [sys.executable, "-c", _PREFACE + program, *arguments],
        input=data,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == 0, (child.returncode, child.stdout[-2000:], child.stderr[-2000:])
    return child.stdout.decode()
