"""dashboards/: rules and panels use existing metrics, and each alert links to a section of the runbook."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from statemgr.telemetry.metric_declarations import declared

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "dashboards"
#: The faults in the runbook, as anchors.
FAULTS = (
    "broker-gone", "blob-store-gone", "disk-full", "missing-rights", "corrupt-record", "topic-damaged", "corrupt-blob",
    "wrong-clock", "input-held-up", "member-stuck", "lag-grows", "blobs-orphaned",
)  # fmt: skip


def rules() -> list[dict[str, Any]]:
    """Return the alert rules."""
    found = yaml.safe_load((DASHBOARDS / "alerts.yml").read_text(encoding="utf-8"))
    return [rule for group in found["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the place and text of each expression in the rules and the dashboard."""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    board = json.loads((DASHBOARDS / "grafana.json").read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for choice in board["templating"]["list"]:
        yield choice["name"], choice.get("definition", "")


def test_every_metric_and_label_exists() -> None:
    """A renamed metric would leave a panel empty and an alert silent."""
    known = {name: {"job", "instance", "le", *metric.labels} for metric in declared() for name in metric.series}
    used = set()
    for where, expression in expressions():
        names = set(re.findall(r"statemgr_\w+", expression))
        assert names <= known.keys(), where
        labels = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        labels |= set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression))
        assert labels <= set().union({"job"}, *(known[name] for name in names)), where
        used |= names
    assert len(used) > 25


def test_the_dashboard_is_what_the_script_writes() -> None:
    """`python scripts/dashboard.py dashboards/grafana.json` writes exactly the file in the repository."""
    script = runpy.run_path(str(ROOT / "scripts" / "dashboard.py"))
    assert (DASHBOARDS / "grafana.json").read_text(encoding="utf-8") == script["text"]()
    panels = script["dashboard"]()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels), "panels lie on top of each other"


def test_each_alert_leads_to_a_section_of_the_runbook() -> None:
    """Every fault in the runbook has an alert, and every alert names the command that prints a section."""
    page = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    sections = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", page, re.MULTILINE)}
    linked = [rule["annotations"]["runbook"].partition("statemgr explain ") for rule in rules()]
    assert {before for before, _, _ in linked} == {""}
    assert set(FAULTS) <= {anchor for _, _, anchor in linked} <= sections


@pytest.mark.parametrize("command", [["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"],
                                     ["test", "rules", "alerts_test.yml"]])  # fmt: skip
def test_promtool_accepts_the_rules(command: list[str]) -> None:
    """promtool accepts the rules and the example configuration, and the unit tests of the rules pass."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    done = subprocess.run([promtool, *command], cwd=DASHBOARDS, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def firing(test: dict[str, Any]) -> set[str]:
    """Return the alerts that must fire in one unit test of the rules. A test without series can make none fire."""
    if not test.get("input_series"):
        return set()
    found = {one["alertname"] for one in test.get("alert_rule_test", ()) if one.get("exp_alerts")}
    for one in test.get("promql_expr_test", ()):
        if 'ALERTS{alertstate="firing"}' in one["expr"]:
            labels = [sample["labels"] for sample in one["exp_samples"] if sample["value"]]
            found |= {name for text in labels for name in re.findall(r'alertname="(\w+)"', text)}
    return found


def test_every_alert_has_a_unit_test() -> None:
    """Each alert fires in a test of alerts_test.yml, and the tests name no other alert."""
    tests = yaml.safe_load((DASHBOARDS / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    assert set().union(*map(firing, tests)) == {rule["alert"] for rule in rules()}
