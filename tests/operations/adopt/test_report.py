"""``statemgr adopt --report``: a report that can be filed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from statemgr import StateManager
from statemgr.model.content import of_pairs
from tests.old_jobs import commit, write
from tests.operations.adopt.test_again import TASKS, TOTALS, stopped
from tests.servers import KafkaServer


def test_a_report_of_a_dry_run_and_of_the_adoption(kafka: KafkaServer, tmp_path: Path) -> None:
    """Both have the hashes of the content, which `migrate verify` would print: one of the old changelogs, one of those
    that were written. The report says what was found, and what the user confirmed."""
    name = kafka.fresh_name("old")
    old = stopped(kafka, tmp_path, name)
    write(kafka, f"{name}-totals", 0, [(b"gone", b"1"), (b"a", b"3"), (b"gone", None)])
    config = old.init(f"{name}-new")
    wanted = [of_pairs(iter(of)) for of in ([(b"a", b"3"), (b"b", b"2")], list(TOTALS.items()))]
    expected = [{"store": "totals", "task": n, "keys": one.keys, "hash": one.hash} for n, one in enumerate(wanted)]
    path = tmp_path / "report.json"

    def filed(*arguments: str) -> dict[str, Any]:
        old.run("--report", str(path), "--json", "--confirm", "totals", *arguments)
        found: dict[str, Any] = json.loads(path.read_text())
        assert found["new_job"] == {"name": f"{name}-new", "id": "1"}
        assert found["confirmed"] == {"totals": None}
        return found

    tried = filed()
    assert (tried["kinds"], tried["reasons"]) == ({"totals": "plain"}, {"totals": "there is no other kind"})
    assert (tried["dry_run"], tried["published"], tried["contents"]) == (True, {}, expected)
    assert filed("--no-count")["contents"] is None
    done = filed("--write")
    assert (done["dry_run"], list(done["published"]), done["contents"]) == (False, list(TASKS), expected)
    assert done["input_offsets"] == tried["input_offsets"] == {f"{name}-in-{n}": 10 for n in (0, 1)}
    again = filed("--write")
    assert again["already_adopted"] is True
    assert [again[fact] for fact in ("published", "input_offsets", "contents")] == [
        done[fact] for fact in ("published", "input_offsets", "contents")
    ]
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.store("totals").put(b"new", b"1")
        task.commit({f"{name}-in-0": 11})
    assert filed()["contents"] is None


def test_a_report_as_text(kafka: KafkaServer, tmp_path: Path) -> None:
    """A person reads the same. A run that is refused leaves an older report as it is, and one that cannot be written
    is refused before anything happens."""
    name = kafka.fresh_name("old")
    old = stopped(kafka, tmp_path, name)
    old.init(f"{name}-new")
    path = tmp_path / "report.txt"
    said = old.run("--report", str(path))
    text = path.read_text()
    assert "dry run: yes" in text
    assert "in place: no" in text
    assert "store totals was taken for plain keys and values: there is no other kind" in text
    assert of_pairs(iter(TOTALS.items())).hash in text
    assert f"{name}-in-0" in text
    assert said.splitlines()[-1] in text
    old.run("--report", str(path), "--no-count")
    without = path.read_text()
    assert "hashes are unknown: the changelogs were not read" in without
    commit(kafka, name, {(f"{name}-in", 0): 30})
    old.run("--report", str(path), "--write", status=2)
    assert path.read_text() == without
    assert list(tmp_path.glob("report*")) == [path]
    text = (job := tmp_path / "job.toml").read_text()
    assert "something else than a report" in old.run("--report", str(job), status=2)
    assert job.read_text() == text
    assert "cannot be written" in old.run("--report", str(tmp_path / "missing" / "report"), status=2)
