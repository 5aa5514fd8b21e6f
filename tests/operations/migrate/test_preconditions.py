"""The preconditions of a stage, without servers of Kafka."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from statemgr import JobConfig
from statemgr.model.jobs.stages import Stage, Step, position_of
from statemgr.operations.migrate.preconditions import _upload_seconds, newest_markers, settled
from statemgr.wiring import open_services
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


@pytest.mark.parametrize("is_there", [False, True])
def test_no_trial_upload_into_a_directory_without_blobs(tmp_path: Path, *, is_there: bool) -> None:
    """It would hide from the job that the disk is not mounted, or that the URI has a typing error."""
    root = tmp_path / "blobs"
    config = JobConfig.from_mapping(
        {"job.name": "orders", "state.dir": str(tmp_path / "state"), "blob.store.uri": root.as_uri()}
    )
    if is_there:
        root.mkdir()
    with closing(open_services(config)) as services:
        assert _upload_seconds(services, 1) is None
        assert root.exists() == is_there
        assert not is_there or not [*root.iterdir()]
        (root / "another-job").mkdir(parents=True)
        assert _upload_seconds(services, 1) is not None
