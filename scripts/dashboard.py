# ruff: noqa: E501 - expressions stay in one line
"""Writes the Grafana dashboard, one row of panels for each question of an operator.

``python scripts/dashboard.py dashboards/grafana.json``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

#: Row → panels: title, unit, and the expressions with their legends. ``$job`` is chosen at the top of the dashboard.
_J = 'job=~"$job"'
ROWS: dict[str, list[tuple[str, str, dict[str, str]]]] = {
    "Does the job keep up?": [
        ("Lag", "short", {f"sum by (job) (statemgr_input_lag{{{_J}}})": "{{job}}"}),
        ("Lag of the ten worst partitions", "short", {
            f"topk(10, sum by (job, topic, partition) (statemgr_input_lag{{{_J}}}))": "{{job}} {{topic}}-{{partition}}"}),
        ("Time since the last commit, ten oldest", "s", {
            f"topk(10, time() - max by (job, task) (statemgr_last_commit_timestamp_seconds{{{_J}}}))":
                "{{job}} {{task}}"}),
        ("Age of the newest checkpoint, ten oldest", "s", {
            f"topk(10, time() - max by (job, task) (statemgr_checkpoint_timestamp_seconds{{{_J}}}))":
                "{{job}} {{task}}"}),
    ],
    "Where does the time of a consumer loop go?": [
        ("Messages processed", "ops", {
            f"sum by (job) (rate(statemgr_input_messages_total{{{_J}}}[$__rate_interval]))": "{{job}}"}),
        ("Messages processed, ten busiest tasks", "ops", {
            f"topk(10, sum by (job, task) (rate(statemgr_input_messages_total{{{_J}}}[$__rate_interval])))":
                "{{job}} {{task}}"}),
        ("Share of the time in process, by process", "percentunit", {
            f"rate(statemgr_process_seconds_sum{{{_J}}}[$__rate_interval])": "{{job}} {{instance}}"}),
        ("Seconds of a call of process", "s", {
            f"histogram_quantile({share}, sum by (job, le) (rate(statemgr_process_seconds_bucket{{{_J}}}[$__rate_interval])))":
                f"{{{{job}}}} {name}" for name, share in (("half", "0.5"), ("99 %", "0.99"))}),
    ],
    "What fails?": [
        ("Failures by kind", "short", {
            f"sum by (job, kind) (increase(statemgr_failures_total{{{_J}}}[$__rate_interval])) > 0": "{{job}} {{kind}}"}),
        ("Commits", "ops", {
            f"sum by (job, outcome) (rate(statemgr_commits_total{{{_J}}}[$__rate_interval]))": "{{job}} {{outcome}}"}),
        ("Failed requests to the blob store", "reqps", {
            f'sum by (operation, outcome) (rate(statemgr_blob_requests_total{{{_J},outcome!="ok"}}[$__rate_interval])) > 0':
                "{{operation}} {{outcome}}"}),
        ("Blobs that would expire", "short", {
            f"max by (job, task) (statemgr_blobs_with_ttl{{{_J}}}) > 0": "{{job}} {{task}}"}),
        ("Problems of the job's own topics", "short", {
            f"max by (job) (statemgr_topic_problems{{{_J}}}) > 0": "{{job}}"}),
    ],
    "Who has the tasks and the state?": [
        ("Tasks by process", "short", {f"statemgr_tasks{{{_J}}}": "{{job}} {{instance}}"}),
        ("Tasks that nobody has", "short", {
            f"max by (job) (statemgr_job_tasks{{{_J}}}) - sum by (job) (statemgr_tasks{{{_J}}}) > 0": "{{job}}"}),
        ("State", "bytes", {f"sum by (job) (statemgr_state_bytes{{{_J}}})": "{{job}}"}),
        ("Keys", "short", {f"sum by (job) (statemgr_state_keys{{{_J}}})": "{{job}}"}),
        ("Ten largest tasks", "bytes", {f"topk(10, statemgr_state_bytes{{{_J}}})": "{{job}} {{task}}"}),
    ],
    "What does RocksDB do?": [
        ("Bytes of table files, ten largest stores", "bytes", {
            f"topk(10, statemgr_rocksdb_bytes{{{_J}}})": "{{job}} {{task}} {{store}}"}),
        ("Keys, ten largest stores", "short", {
            f"topk(10, statemgr_rocksdb_keys{{{_J}}})": "{{job}} {{task}} {{store}}"}),
        ("Memory in use, and its limit", "bytes", {
            f"statemgr_memory_bytes{{{_J}}}": "{{job}} {{instance}}",
            f"max by (job) (statemgr_memory_limit_bytes{{{_J}}})": "{{job}} limit"}),
        ("Memtables, ten largest", "bytes", {
            f"topk(10, statemgr_rocksdb_memtable_bytes{{{_J}}})": "{{job}} {{task}} {{store}}"}),
        ("Bytes that wait for compaction, ten most", "bytes", {
            f"topk(10, statemgr_rocksdb_compaction_bytes{{{_J}}})": "{{job}} {{task}} {{store}}"}),
        ("Stores whose writes are slowed", "short", {
            f"statemgr_rocksdb_writes_slowed{{{_J}}} > 0": "{{job}} {{task}} {{store}}"}),
    ],
    "What is restored, and how long would a restore take?": [
        ("Restores in progress", "percentunit", {
            f"statemgr_restore_progress_ratio{{{_J}}} < 1": "{{job}} {{task}} {{store}}"}),
        ("Restores by backend and reason", "short", {
            f"sum by (backend, reason) (increase(statemgr_restores_total{{{_J}}}[$__rate_interval])) > 0":
                "{{backend}}: {{reason}}"}),
        ("Bytes fetched by restores", "Bps", {
            f"sum by (backend) (rate(statemgr_restore_bytes_total{{{_J}}}[$__rate_interval]))": "{{backend}}"}),
        ("Seconds per restore", "s", {
            f"sum by (backend) (increase(statemgr_restore_seconds_total{{{_J}}}[$__rate_interval])) / sum by (backend) "
            f"(increase(statemgr_restores_total{{{_J}}}[$__rate_interval]))": "{{backend}}"}),
        ("Segments after the snapshot, ten most", "short", {
            f"topk(10, statemgr_segments{{{_J}}})": "{{job}} {{task}} {{store}}"}),
        ("Bytes of these segments, ten most", "bytes", {
            f"topk(10, statemgr_segments_bytes{{{_J}}})": "{{job}} {{task}} {{store}}"}),
        ("Background snapshots", "short", {
            f"sum by (job, outcome) (increase(statemgr_materializations_total{{{_J}}}[$__rate_interval]))":
                "{{job}} {{outcome}}"}),
        ("Duration of the last snapshot", "s", {
            f"topk(10, statemgr_materialization_seconds{{{_J}}})": "{{job}} {{task}} {{store}}"}),
    ],
    "What does a commit cost?": [
        ("Phases of the last commit, mean of the tasks", "s", {
            f"avg by (job, phase) (statemgr_commit_seconds{{{_J}}})": "{{job}} {{phase}}"}),
        ("Publishing transactions", "s", {
            f"histogram_quantile({share}, sum by (job, le) (rate(statemgr_publish_seconds_bucket{{{_J}}}[$__rate_interval])))":
                f"{{{{job}}}} {name}" for name, share in (("half", "0.5"), ("99 %", "0.99"))}),
        ("Changes and bytes of the last commits", "short", {
            f"sum by (job) (statemgr_commit_changes{{{_J}}})": "{{job}} changes",
            f"sum by (job) (statemgr_commit_uploaded_bytes{{{_J}}})": "{{job}} bytes"}),
        ("Share of the time that tasks wait for commits", "percentunit", {
            f"sum by (job) (rate(statemgr_commit_blocked_seconds_total{{{_J}}}[$__rate_interval]))"
            f" / sum by (job) (statemgr_tasks{{{_J}}})": "{{job}}"}),
    ],
    "What does the blob store do?": [
        ("Requests", "reqps", {
            f"sum by (operation) (rate(statemgr_blob_requests_total{{{_J}}}[$__rate_interval]))": "{{operation}}"}),
        ("Bytes", "Bps", {
            f"sum by (direction) (rate(statemgr_blob_bytes_total{{{_J}}}[$__rate_interval]))": "{{direction}}"}),
        ("Repeated requests", "reqps", {
            f"sum by (operation) (rate(statemgr_blob_retries_total{{{_J}}}[$__rate_interval]))": "{{operation}}"}),
        ("Extra requests, because the first one was slow", "reqps", {
            f"sum by (operation) (rate(statemgr_blob_hedges_total{{{_J}}}[$__rate_interval]))": "{{operation}}"}),
    ],
    "Micro-batches of Spark": [
        ("Batches", "ops", {
            f"sum by (job, kind) (rate(statemgr_batches_total{{{_J}}}[$__rate_interval]))": "{{job}} {{kind}}"}),
        ("Rows", "ops", {
            f"sum by (job, kind) (rate(statemgr_batch_rows_total{{{_J}}}[$__rate_interval]))": "{{job}} {{kind}}"}),
        ("Seconds per batch", "s", {
            f"sum by (job, phase) (rate(statemgr_batch_seconds_total{{{_J}}}[$__rate_interval])) / on (job) group_left () "
            f"sum by (job) (rate(statemgr_batches_total{{{_J}}}[$__rate_interval]))": "{{job}} {{phase}}"}),
        ("Delay of the watermark", "s", {f"time() - statemgr_watermark_seconds{{{_J}}}": "{{job}}"}),
    ],
}  # fmt: skip
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 6, 8, 4


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for question, row in ROWS.items():
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": question, "collapsed": False, "panels": []}
            | {"gridPos": {"h": 1, "w": 24, "x": 0, "y": top}}
        )
        top += 1
        for number, (title, unit, expressions) in enumerate(row):
            place = {"x": number % _COLUMNS * _WIDTH, "y": top + number // _COLUMNS * _HEIGHT}
            panels.append(_panel(len(panels) + 1, title, unit, expressions, place))
        top += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "uid": "statemgr",
        "title": "statemgr",
        "tags": ["statemgr"],
        "editable": True,
        "refresh": "30s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_choice_of_source(), _choice_of_job()]},
        "panels": panels,
    }


def _panel(number: int, title: str, unit: str, expressions: dict[str, str], place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": _SOURCE}
        for index, (expression, legend) in enumerate(expressions.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, **place},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 10}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _choice_of_source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _choice_of_job() -> dict[str, Any]:
    query = "label_values(statemgr_tasks, job)"
    choice = {"name": "job", "label": "Job", "type": "query", "datasource": _SOURCE, "definition": query}
    asked = {"query": {"query": query, "refId": "job"}, "refresh": 2, "sort": 1}
    return choice | asked | {"multi": True, "includeAll": True, "allValue": ".*"}


def text() -> str:
    """The content of the file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(text(), encoding="utf-8")
