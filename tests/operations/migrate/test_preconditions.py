"""The preconditions of a stage, without servers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from statemgr.model.jobs.stages import Stage, Step, position_of
from statemgr.operations.migrate.preconditions import newest_markers, settled
from tests import model_samples as sample


@pytest.mark.parametrize("factory", ["blob-store", "kafka-changelog"])
def test_a_backend_without_the_newest_checkpoint(factory: str) -> None:
    """The next stage cannot restore from that backend. For the blob store, the fix builds the first snapshots."""
    markers = {f: of for f, of in sample.CHECKPOINT.state_checkpoint_markers.items() if f != factory}
    record = replace(sample.RECORD, checkpoints=(replace(sample.CHECKPOINT, state_checkpoint_markers=markers),))
    assert newest_markers([position_of(sample.RECORD, "totals", Stage.DUAL_COMMIT)], factory).met
    found = newest_markers([position_of(record, "totals", Stage.DUAL_COMMIT)], factory)
    assert not found.met
    assert f"{factory} lacks the newest checkpoint of 1 store" in found.detail
    assert found.fix is not None
    assert ("`statemgr materialize`" in found.fix) == (factory == "blob-store")


@pytest.mark.parametrize("configured", Stage)
def test_a_step_forward_from_a_stage_that_the_configuration_has_left(configured: Stage) -> None:
    """The file went back a stage, and the job was not restarted: forward from the checkpoint's stage would leave those
    that start with that file without a backend."""
    backup = {"totals": Stage.BLOBS_FIRST.backup}
    current = replace(
        sample.CHECKPOINT, backup_factories=backup, restore_factories={"totals": Stage.BLOBS_FIRST.restore}
    )
    position = position_of(replace(sample.RECORD, checkpoints=(current,)), "totals", configured)
    found = settled(Step(Stage.BLOBS_FIRST, Stage.BLOBS, written=configured is Stage.BLOBS), [position], True)
    assert found.met == (configured >= Stage.BLOBS_FIRST)
    assert found.met or f"asks for stage {configured.value}" in found.detail
