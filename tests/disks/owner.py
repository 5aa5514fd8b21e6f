"""An owner on a disk that fails: ``python -m tests.disks.owner '{…}'``, with ``faults.c`` loaded.

Without ``faults``, it commits until it is killed. Otherwise it commits once for each of these ``[kind, call, times,
error]``, goes on until a commit succeeds again, and prints the kinds of errors as JSON in the end.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path

from statemgr import JobConfig
from statemgr.local import durable
from tests.clusters.recording import TaskClient

KINDS = ("write", "read", "sync", "rename", "open", "remove")


def main() -> None:
    """Commit."""
    order = json.loads(sys.argv[1])
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    durable._BOOT_ID = Path(order["boot"])  # a power loss is followed by another start of the system
    client = TaskClient(JobConfig.from_mapping(order["config"]), Path(order["log"]))
    if "faults" not in order:
        while client.commit():
            print("committed", flush=True)
        raise client.errors[-1]
    disk = ctypes.CDLL(None)
    seen: Counter[str] = Counter()
    for kind, call, times, error in order["faults"]:
        if call % 2:
            client.close()  # the next commit opens the task
        disk.disk_fault(KINDS.index(kind), call, times, error)
        before = disk.disk_hits()
        if not client.commit():
            seen[f"{kind}: {type(client.errors[-1]).__name__}"] += 1
        disk.disk_fault(KINDS.index(kind), 0, 0, 0)
        seen["hits"] += disk.disk_hits() - before
        end = time.monotonic() + 60
        while not client.commit():
            assert time.monotonic() < end, client.errors[-1]
    client.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
