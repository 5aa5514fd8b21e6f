"""A process that opens a state by need, reads keys while it fetches the rest, and dies by SIGKILL at the n-th step.

A step is a write to a table file, the opening of the store, or the end of a file.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from statemgr import JobConfig
from statemgr.backends.blobs.partial_tables import PartialTables
from statemgr.local.rocksdb.partial import PartialStore
from statemgr.local.transfer_files import NewFile
from statemgr.model.checkpoint import BlobMarker
from tests.by_need import key, partial_state

#: What counts as a step.
STEPS: tuple[tuple[Any, str], ...] = (
    (NewFile, "write"), (PartialStore, "open_partial"), (PartialTables, "_finish"), (PartialStore, "become_whole"),
)  # fmt: skip


def die_at(number: int) -> None:
    """Kill this process at the n-th step."""
    seen, lock = [0], threading.Lock()

    def counting(step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            with lock:
                seen[0] += 1
                if seen[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments)

        return counted

    for owner, name in STEPS:
        step = vars(owner)[name]
        made = counting(getattr(step, "__func__", step))
        setattr(owner, name, classmethod(made) if isinstance(step, classmethod) else made)


def main() -> None:
    """Run the order in the first argument."""
    order = json.loads(sys.argv[1])
    die_at(order["die_at"])
    source = random.Random(order["die_at"])
    marker, here = BlobMarker(inline=bytes.fromhex(order["marker"])), Path(order["here"])
    with partial_state(
        JobConfig.from_mapping(order["config"]), marker, here, [Path(one) for one in order["left"]]
    ) as state:
        rest = threading.Thread(target=state.fetch_rest, args=(lambda: None,))
        rest.start()
        while rest.is_alive():
            state.store.get(key(source.randrange(24_000)))
        rest.join()


if __name__ == "__main__":
    main()
