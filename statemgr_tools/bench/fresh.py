"""Runs a measurement in its own process, so that nothing is warm and its peak memory can be measured.

A measurement is a function of keyword arguments that JSON can carry, and returns a JSON object.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from statemgr.errors import StatemgrError
from statemgr.local.machine import SystemClock

#: Two hours, because Spark's processors with data frames need most of one.
_DEADLINE_S = 7200


class MeasurementFailed(StatemgrError):
    """A measuring process failed. The message contains the end of its output."""


def in_fresh_process(function: str, **arguments: Any) -> dict[str, Any]:
    """Call ``module:function`` in a new Python process. Returns its result and ``peak_bytes``, its peak memory.

    Raises: MeasurementFailed, also if the process does not end within two hours.
    """
    command = [sys.executable, "-m", "statemgr_tools.bench.fresh", function]
    try:
        run = subprocess.run(
            command,
            input=json.dumps(arguments),
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"},  # a crash of native code says where it was
        )
    except subprocess.TimeoutExpired as error:
        raise MeasurementFailed(f"{function} has not ended within {_DEADLINE_S} s") from error
    if run.returncode != 0:
        raise MeasurementFailed(f"{function} ended with {run.returncode}: {run.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def seconds_alive() -> float:
    """Return the seconds since this process started, to about 10 ms."""
    return SystemClock().time_ns() / 1e9 - psutil.Process().create_time()


def peak_bytes() -> int:
    """Return the peak of this process's resident memory.

    The number comes from ``/proc`` where that exists. Elsewhere, the system may return the number of the parent
    process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    """Run the new process: read arguments from stdin, and print the result as the last line of stdout."""
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    result = function(**json.load(sys.stdin))
    sys.stdout.write(json.dumps({**result, "peak_bytes": peak_bytes()}) + "\n")


if __name__ == "__main__":
    main()
