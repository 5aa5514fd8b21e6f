"""A driver that a new owner has fenced does not call its sink, and the delivered output stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pyspark.sql import DataFrame

from tests.jobs import with_changes
from tests.spark.conftest import OUTPUT, ROOT, Pipeline
from tests.spark.test_outbox import large

MakePipeline = Callable[..., Pipeline]


@pytest.mark.long
@pytest.mark.parametrize("rows", ["before", "after"])
def test_a_suspended_driver_wakes_up_after_a_new_owner_has_moved_on(
    pipeline: MakePipeline, tmp_path: Path, rows: str
) -> None:
    """FAULT 42: a driver suspended between publish and output delivers nothing after a new owner has moved on.

    The driver has its output rows before SIGSTOP, or misses their blobs after SIGCONT.
    """
    job = pipeline(tasks=2, backup=["blob-store"], task__checkpoint__retained=1)
    job.produce(60)
    zombie = tmp_path / "zombie.json"
    zombie.write_text(json.dumps(with_changes(job.config, state__dir=str(tmp_path / "other")).to_mapping()))
    with (tmp_path / "zombie.log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.suspended_job", str(zombie), job.topic, str(tmp_path), rows],
            env=os.environ | {"PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        _until_stopped(driver)

        def write(rows: DataFrame, sequence: int) -> None:
            rows.write.mode("overwrite").parquet(f"{tmp_path}/output/sequence={sequence}")
            job.outputs.write(rows, sequence)

        for _ in range(3):  # the first start also delivers the suspended driver's sequence
            job.run(job.query().process(large, OUTPUT).output(write))
            job.produce(60)
        delivered = _delivered(job, tmp_path)
        assert sorted(delivered) == [1, 2, 3, 4]

        driver.send_signal(signal.SIGCONT)
        printed, _ = driver.communicate(timeout=300)
    finally:
        driver.kill()
        driver.communicate()

    assert json.loads(printed.splitlines()[-1]) == {"calls": [], "error": "FencedError"}
    assert _delivered(job, tmp_path) == delivered == {sequence: len(rows) for sequence, rows in job.outputs.calls}


def _until_stopped(driver: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while psutil.Process(driver.pid).status() != psutil.STATUS_STOPPED:
        assert driver.poll() is None, "the driver ended before its publish"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _delivered(job: Pipeline, directory: Path) -> dict[int, int]:
    """Return sequence → number of rows."""
    parts = directory.glob("output/sequence=*")
    return {int(path.name.partition("=")[2]): job.spark.read.parquet(str(path)).count() for path in parts}
