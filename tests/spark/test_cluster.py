"""Executors in processes of their own, as on a cluster: nothing travels but what Spark ships."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.servers import KafkaServer
from tests.spark.conftest import ROOT, make_pipeline


@pytest.mark.timeout(480)
def test_two_executors_commit_one_checkpoint(kafka: KafkaServer, tmp_path: Path) -> None:
    """Tasks on two executor processes, two batches: state from both backends and output equal the input."""
    job = make_pipeline(None, kafka, tmp_path, tasks=4)
    job.produce(120)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(job.config.to_mapping()))
    environment = {
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_LOCAL_IP": "127.0.0.1",
        # the standalone workers write below it
        "SPARK_WORKER_DIR": str(tmp_path / "work"),
    }
    run = subprocess.run(
        [sys.executable, "-m", "tests.spark.cluster_job", str(config), job.topic, job.location.as_uri(), str(tmp_path)],
        env=os.environ | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.splitlines()[-1])

    assert result["executors"] == 2
    job.outputs.calls = [(sequence, [tuple(row) for row in rows]) for sequence, rows in result["outputs"]]
    assert [sequence for sequence, _ in job.outputs.calls] == list(range(1, len(job.outputs.calls) + 1))
    assert len(job.outputs.calls) > 1
    assert job.outputs.counts() == job.state("blob-store") == job.state("kafka-changelog") == job.produced
