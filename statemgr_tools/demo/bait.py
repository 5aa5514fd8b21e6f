"""Aims the demo's kill at a phase: the process that reaches it writes a file and waits for the kill."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from statemgr.phases import Phase, add_observer, remove_observer

#: The steps of a batch, from the state's flush on an executor to the output on the driver.
AIMS = (
    Phase.FLUSH,
    Phase.CHECKPOINT_DIR,
    Phase.DIFF,
    Phase.UPLOAD,
    Phase.PUT_INDEX,
    Phase.PUT_SEGMENTS,
    Phase.PREPARED,
    Phase.BEGIN,
    Phase.SEND_CHANGELOG,
    Phase.SEND_CHECKPOINT,
    Phase.COMMIT_TRANSACTION,
    Phase.ACKNOWLEDGED,
    Phase.REMOVE_TTL,
    Phase.DELETE_BLOBS,
    Phase.DELETE_INDEX,
    Phase.CLEANED_UP,
    Phase.OUTPUT,
)
#: After this many batches, the kill takes any phase, because the aimed one may not come (if nothing is to be deleted,
#: say).
_PATIENCE = 2
_WAIT_S = 300


@dataclass
class Bait:
    """Wait for the kill in ``phase`` of batch number ``batch`` of this process (from 1), and announce it in ``file``.

    ``current`` is the running batch. It is sent to the executors with the process function.
    """

    phase: str
    batch: int
    file: str
    current: int = 1

    def __call__(self, phase: Phase, subject: str) -> None:
        """Observe a phase. Does not return if it is the aimed one."""
        aimed = self.current >= self.batch and phase == self.phase
        late = self.current >= self.batch + _PATIENCE and phase in AIMS
        if not aimed and not late:
            return
        hit = {"phase": str(phase), "subject": subject, "batch": self.current, "pid": os.getpid()}
        target = Path(self.file)
        written = target.with_name(f"{target.name}.{os.getpid()}")
        written.write_text(json.dumps(hit))
        written.replace(target)
        threading.Event().wait(_WAIT_S)
        raise SystemExit("the kill that was announced never came")


_installed: list[Bait] = []


def install(bait: Bait | None) -> None:
    """Replace the bait of this process, because a worker process runs several batches."""
    while _installed:
        remove_observer(_installed.pop())
    if bait is not None:
        add_observer(bait)
        _installed.append(bait)


def draw(seed: int, kills: int, aims: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Draw a phase and a batch for each kill with the seed. ``aims`` replaces the first phases."""
    chance = random.Random(seed)
    phases = [str(phase) for phase in AIMS]
    drawn = [(chance.choice(phases), chance.randint(3, 5)) for _ in range(kills)]
    return [(aims[i] if i < len(aims) else phase, batch) for i, (phase, batch) in enumerate(drawn)]
