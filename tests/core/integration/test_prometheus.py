"""A real Prometheus with the alert rules scrapes a real process of a job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from statemgr import JobConfig
from statemgr_tools.dev.process import free_port
from tests.jobs import job_mapping
from tests.kafka_jobs import wait_until
from tests.loop_members import Process, make_topic, produce
from tests.servers import KafkaServer

pytestmark = pytest.mark.integration
#: Panels that have numbers for any consumer loop.
FILLED = {
    "Lag", "Lag of the ten worst partitions", "Time since the last commit, ten oldest", "Tasks by process", "State",
    "Age of the newest checkpoint, ten oldest", "Keys", "Commits", "Requests", "Bytes", "Publishing transactions",
    "Phases of the last commit, mean of the tasks",
}  # fmt: skip
DASHBOARDS = Path(__file__).parents[3] / "dashboards"


def ask(port: int, path: str, **parameters: str) -> Any:
    """Return the data of an answer of Prometheus, or None while it does not answer."""
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]
    except OSError:
        return None


@pytest.mark.long
def test_prometheus_scrapes_a_job_and_knows_every_rule_and_panel(kafka: KafkaServer, tmp_path: Path) -> None:
    """The rules load and are healthy, Prometheus answers each expression of the dashboard, and the panels that any
    consumer loop fills have numbers. The job's series disappear with the process."""
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("no prometheus: apt-get install prometheus")
    metrics, port = free_port(), free_port()
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=2, metrics__port=metrics, task__commit__ms=500))
    topic = kafka.fresh_name("input")
    make_topic(kafka, topic, 2)
    produce(kafka, topic, 2, range(200))
    settings = tmp_path / "prometheus.yml"
    settings.write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{DASHBOARDS / 'alerts.yml'}]\n"
        "scrape_configs:\n  - job_name: statemgr\n    honor_labels: true\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{metrics}']}}]\n",
        encoding="utf-8",
    )
    member = Process.start(config, kafka.fresh_name("group"), topic, tmp_path / "log")
    command = [prometheus, f"--config.file={settings}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    with (tmp_path / "prometheus.log").open("w") as log:
        server = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, env=os.environ | {"TZ": "UTC"}
        )
    try:
        job = config.job_name

        def number(expression: str) -> float | None:
            found = ask(port, "query", query=expression)
            return float(found["result"][0]["value"][1]) if found and found["result"] else None

        wait_until(lambda: number(f'sum(statemgr_commits_total{{job="{job}",outcome="published"}})') not in (None, 0))
        wait_until(lambda: number(f'sum(statemgr_input_lag{{job="{job}"}})') == 0)
        assert number(f'statemgr_tasks{{job="{job}"}}') == 2
        wait_until(lambda: len(health(port)) > 15 and set(health(port)) == {"ok"})
        wait_until(lambda: not unanswered(port, job) & FILLED)
        member.child.terminate()
        wait_until(lambda: number(f'statemgr_tasks{{job="{job}"}}') is None)
    finally:
        for child in (server, member.child):
            child.terminate()
        server.wait(60)
        member.child.communicate(timeout=300)


def health(port: int) -> list[str]:
    """Return the health of each rule."""
    return [rule["health"] for group in ask(port, "rules")["groups"] for rule in group["rules"]]


def unanswered(port: int, job: str) -> set[str]:
    """Return the panels that have no number now. Prometheus must answer every expression."""
    empty = set()
    for panel in json.loads((DASHBOARDS / "grafana.json").read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$job", job).replace("$__rate_interval", "1m")
            found = ask(port, "query", query=query)
            assert found is not None, (panel["title"], query)
            if not found["result"]:
                empty.add(panel["title"])
    return empty
