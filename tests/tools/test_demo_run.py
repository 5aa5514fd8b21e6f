"""A run of the demo around its pipeline: which directory it clears, how it ends and what it prints. No servers."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from decimal import Decimal
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from rich.console import Console

from statemgr import JobConfig
from statemgr.cli.main import cli
from statemgr.errors import InvalidError, StatemgrError
from statemgr_tools.demo import first_answer as demo_first_answer
from statemgr_tools.demo import migration
from statemgr_tools.demo.child import Outcome
from statemgr_tools.demo.migration import Walk
from statemgr_tools.demo.pipeline import java_options
from statemgr_tools.demo.settings import own_directory
from statemgr_tools.demo.show import first_answer_table, totals_table
from statemgr_tools.demo.summary import Start, Summary
from statemgr_tools.demo.timeline import Sample, Timeline, picture, save
from statemgr_tools.demo.verify import Side
from statemgr_tools.dev.signals import exit_on_signals


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """The demo refuses a directory with other files, a file or a link. It gives a hint and changes nothing."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("mine")
    for name in ("link", "file", "demo"):
        with pytest.raises(InvalidError) as caught:
            own_directory(tmp_path / name)
        assert caught.value.hint
    assert (tmp_path / "demo" / "thesis.tex").read_text() == (tmp_path / "file").read_text() == "mine"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_run_before_is_removed(tmp_path: Path) -> None:
    """The demo removes its own earlier files without following links out of its directory."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    made = own_directory(tmp_path / "new" / "demo")
    (made / "output" / "deep").mkdir(parents=True)
    (made / "link").symlink_to(tmp_path / "outside")
    (made / "job.toml").touch()
    before = set(own_directory(made).iterdir())
    assert [path.name for path in before] == [".statemgr-demo"]
    assert (tmp_path / "outside" / "file").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_exception(number: signal.Signals) -> None:
    """The first signal ends the run with its status. A second one does not interrupt the clean-up."""
    found = signal.signal(number, signal.SIG_DFL)  # the signal may be ignored here, as under nohup
    before = signal.getsignal(number)
    cleaned = []

    def signalled() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
            cleaned.append(number)

    try:
        with pytest.raises(SystemExit) as caught, exit_on_signals():
            signalled()
        assert caught.value.code == 128 + number
        assert cleaned == [number]
        assert signal.getsignal(number) == before
    finally:
        signal.signal(number, found)


def test_an_ignored_signal_stays_ignored() -> None:
    """A signal that is ignored, as under nohup, stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_options_of_the_jvm_survive_spaces() -> None:
    """Spaces, quotes and backslashes are quoted by the rules of Spark's launcher."""
    assert java_options("/a b").startswith('"-Djava.io.tmpdir=/a b" ')
    assert java_options('/a"b\\c').startswith('"-Djava.io.tmpdir=/a\\"b\\\\c" ')


def test_errors_go_to_stderr(tmp_path: Path) -> None:
    """A damaged file gives one line and a hint on stderr. Stdout, which is reserved for JSON, stays empty."""
    table = tmp_path / "table.csv.gz"
    table.write_bytes(b"key,a\nx,1\n")
    arguments = ["demo", "--json", "--input", str(table), "--key", "key", "--sum", "a", "--directory", str(tmp_path)]
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: the input cannot be read")
    assert "hint: " in result.stderr
    assert not (tmp_path / "demo").exists()


def test_the_summary_as_json() -> None:
    """The JSON has the seed, the starts with kills and restores, and each side's exact totals with the verdict."""
    great = Decimal("12345678901234567890.10")
    tallies = {b"k": (2, 0, (1,), (great,), (Decimal("1E+3"),))}
    restored = {"store": "totals", "factory": "blob-store", "seconds": 0.5, "bytes_fetched": 7, "records": 0}
    starts = [
        Start(
            None, Outcome("upload.put", "x", 3, 1.0), [{"tasks": [{"restored": []}], "replayed": False}], "upload.put"
        ),
        Start("blob-store", Outcome(None, "", 0, 2.0), [{"tasks": [{"restored": [restored]}] * 2, "replayed": True}]),
    ]
    sides = [Side("recount", tallies), Side("output", tallies), Side("blob state", {})]

    def summary(rows: int, sides: list[Side]) -> dict[str, object]:
        found = Summary(5, "file", "/d", "rows", ["a"], rows, starts, sides, "", 3.0).to_dict()
        loaded: dict[str, object] = json.loads(json.dumps(found))
        return loaded

    whole = summary(2, sides[:2])
    assert whole["seed"] == 5
    assert whole["equal"] is True
    first, second = whole["starts"]  # type: ignore[misc]
    assert (first["killed_in"], first["aimed_at"], first["restores"]) == ("upload.put", "upload.put", [])
    assert (second["killed_in"], second["restored_from"], second["replayed"]) == (None, "blob-store", 1)
    assert second["restores"][0]["tasks"] == 2
    assert second["restores"][0]["bytes_fetched"] == 14
    totals = whole["totals"]["output"]  # type: ignore[index]
    assert totals["measures"] == {"a": {"missing": 1, "sum": "12345678901234567890.1", "largest": "1000"}}
    assert summary(3, sides[:2])["equal"] is False
    assert summary(2, sides)["equal"] is False
    assert summary(2, sides)["totals"]["blob state"]["different_keys"] == 1  # type: ignore[index]


def test_the_first_answer_of_a_large_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is made in the run's blob store, and the first answer needs a small part of it. No files are left."""
    monkeypatch.setattr(demo_first_answer, "_COUNT", 100_000)
    job: dict[str, object] = {
        "job.name": "demo",
        "kafka.bootstrap.servers": "localhost:1",
        "state.dir": str(tmp_path / "state"),
        "stores.totals.type": "rocksdb",
        "blob.store.uri": (tmp_path / "blobs").as_uri(),
    }
    scratch = tmp_path / "scratch"
    found = demo_first_answer.first_answer(JobConfig.from_mapping(job), scratch, 1, lambda _: None)
    assert not scratch.exists()
    assert found.first_seconds < found.whole_seconds
    assert found.fetched < found.bytes / 10
    assert found.bytes > 100_000 * 100
    console = Console(file=io.StringIO(), width=120)
    console.print(first_answer_table(found))
    assert isinstance(console.file, io.StringIO)
    assert f"{found.bytes:,}" in console.file.getvalue()


def test_the_picture_of_a_migration(tmp_path: Path) -> None:
    """Each value has a line, the largest value has the highest bar, and a kill is marked where it happened."""
    timeline = Timeline(tmp_path / "job.toml", lambda: 0)
    for second in range(100):
        stage = 1 + second // 25
        timeline.samples.append(Sample(float(second), stage, 4 if second < 50 else 6, second, 1000 - second, 0))
    timeline.events.append((99.0, "killed"))
    console = Console(file=io.StringIO(), width=80)
    console.print(picture(timeline, 80))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    by_label = {line[:20].strip(): line for line in lines}
    assert set("1234") < set(by_label["stage"])
    assert by_label["✗ kill  ⇄ rescale"].rstrip().endswith("✗")
    assert "4466" in by_label["tasks"]
    assert by_label["rows that wait"].split()[-2].endswith("█")
    assert by_label["rows that wait"].split()[-1] == "99"
    assert not set("▁▂▃▄▅▆▇█") & set(by_label["bytes in blobs"])
    save(timeline, tmp_path / "migration.svg")
    assert "<svg" in (tmp_path / "migration.svg").read_text()


def test_a_migration_has_no_aims() -> None:
    """`--aim` has no effect on a migration, so it is refused."""
    result = CliRunner().invoke(cli, ["demo", "--migrate", "--aim", "output.write"])
    assert result.exit_code == 2
    assert "--seed" in result.output


def test_names_of_columns_are_shown_as_they_are() -> None:
    """Square brackets in a name of ``--sum`` are text in the table of totals."""
    out = io.StringIO()
    Console(file=out, width=100).print(totals_table([Side("recount", {})], ["rate [/h]", "[red]"], "rows"))
    assert "rate [/h]: sum" in out.getvalue()
    assert "[red]: sum" in out.getvalue()


def test_a_command_of_the_migration_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command has longer than it waits for the job, and one that does not end is named."""
    walk = Walk(Mock(config=tmp_path / "job.toml", log=tmp_path / "log"), Mock(), Random(1), Mock(), Mock())

    def hang(command: list[str], timeout: float, **_: object) -> None:
        assert timeout > int(command[command.index("--timeout") + 1])
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(StatemgrError, match="advance --wait --timeout 300` has not ended") as caught:
        walk._command("migrate", "advance", "--wait", "--timeout", str(migration._WAIT_S))
    assert str(tmp_path / "log") in str(caught.value.hint)
