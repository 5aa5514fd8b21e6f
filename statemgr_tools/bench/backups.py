"""Backups of generated states in a blob store. The product makes them, without Kafka."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statemgr.config import JobConfig
from statemgr.engine import checkpoint_from_bytes, checkpoint_to_bytes
from statemgr.model.checkpoint import Checkpoint
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.memory import fresh_place
from statemgr_tools.bench.seed import SEED
from statemgr_tools.bench.session import Session, changed
from statemgr_tools.bench.states import State


@dataclass(frozen=True, kw_only=True)
class Backup:
    """A job whose state is in its blob store: the checkpoint to restore, the upload's seconds and its peak memory."""

    state: State
    config: JobConfig
    checkpoint: Checkpoint
    seconds: float
    peak: int

    def arguments(self, state_dir: Path) -> dict[str, Any]:
        """Return the arguments of a process that restores the state in ``state_dir``."""
        config = changed(self.config, state__dir=str(state_dir))
        return {"config": config.to_mapping(), "checkpoint": checkpoint_to_bytes(self.checkpoint).hex()}


def backup_of(session: Session, state: State, *, s3: bool) -> Backup:
    """Return a backup of this state, made once per run."""
    return session.shared(f"backup of {state.directory} s3={s3}", lambda: upload(session, state, s3=s3))


def upload(session: Session, state: State, *, s3: bool) -> Backup:
    """Upload a complete state from a new process, in the first commit of a job that starts from it."""
    session.report(f"backing up {state.bytes / 2**20:,.0f} MiB")
    config = session.job("backup", kafka=False, s3=s3, task__backup__factories="blob-store")
    with fresh_place(session, "backup", state.bytes) as (place, held):
        seeded = changed(config, task__restore__factories=SEED, state__dir=str(place))
        found = in_fresh_process(
            "statemgr_tools.bench.operations:backup",
            config=seeded.to_mapping(), checkpoint=checkpoint_to_bytes(state.checkpoint).hex(), held=str(held),
        )  # fmt: skip
    checkpoint = checkpoint_from_bytes(bytes.fromhex(found["checkpoint"]))
    return Backup(state=state, config=config, checkpoint=checkpoint, seconds=found["seconds"], peak=found["peak_bytes"])
