"""The parts of a benchmark: result lines and verdicts, rounds and medians, the table of cases, and the reports."""

from __future__ import annotations

import json
import math
import random
import time
import urllib.request
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from statemgr.errors import ConfigError, InvalidError, UnavailableError
from statemgr.kafka.topics import TopicAdmin, checkpoint_topic_spec
from statemgr.local.machine import SystemClock
from statemgr_tools.bench import plain_s3, plots, records, registry, render
from statemgr_tools.bench.addresses import S3Address, Servers
from statemgr_tools.bench.cases import segments
from statemgr_tools.bench.fresh import MeasurementFailed, in_fresh_process
from statemgr_tools.bench.measure import Series, interleaved, percentile
from statemgr_tools.bench.proxy import FLIP_158, SlowProxy, fixed
from statemgr_tools.bench.requests import kind_of
from statemgr_tools.bench.result import NOT_AVAILABLE, Target, alone, compared, of_rounds
from statemgr_tools.bench.session import SMALL, Plan, Session
from statemgr_tools.bench.sweeps import Curve, Picture
from tests.jobs import job_mapping
from tests.servers import KafkaServer, S3Server

_FIELDS = ["case", "value", "unit", "reference", "reference_value", "ratio", "spread", "target", "reached"]


@pytest.mark.parametrize(
    ("target", "ours", "theirs", "reached", "miss"),
    [
        (Target("at least", 0.8), 90.0, 100.0, True, 0.0),
        (Target("at least", 0.8), 60.0, 100.0, False, 0.25),
        (Target("at most", 1.2), 120.0, 100.0, True, 0.0),
        (Target("at most", 0.5), 100.0, 100.0, False, 1.0),
    ],
)
def test_a_line_compares_with_its_reference(
    target: Target, ours: float, theirs: float, reached: bool, miss: float
) -> None:
    """The ratio is the value over the reference. The target gives the verdict, and the miss is a share of the bound."""
    line = compared("restore-file", ours, "MB/s", "a plain copy", theirs, target)
    assert line.result.ratio == ours / theirs
    assert line.result.reached is reached
    assert line.miss == pytest.approx(miss)


def test_a_reference_that_is_not_there_gives_no_verdict() -> None:
    """The line shows that the reference is not available. It keeps its target, but is neither reached nor missed."""
    line = compared("restore-s3", 5.0, "MB/s", "Samza", None, Target("at least", 2))
    assert line.result.reached is None
    assert NOT_AVAILABLE in line.result.reference
    assert (line.result.target, render.verdict(line)) == ("≥ 2×", "–")


def test_a_line_without_a_reference_is_bound_by_its_value() -> None:
    """Peak memory has a limit but no reference to compare it with."""
    limit = Target("at most", 256, of="value")
    assert alone("peak-memory", 200.0, "MB", "a restore", limit).result.reached is True
    assert alone("peak-memory", 300.0, "MB", "a restore", limit).result.reached is False


def test_json_has_exactly_the_fields_of_the_contract() -> None:
    """The fields are in order, numbers are rounded, and a value that JSON cannot express is null."""
    line = compared("commit-idle", 1.23456789, "s", "none", 0.0, Target("at most", 0.01))
    fields = line.result.to_dict()
    assert list(fields) == _FIELDS
    assert fields["value"] == 1.235
    assert (line.result.ratio, fields["ratio"]) == (math.inf, None)
    json.dumps(fields, allow_nan=False)


def test_variants_are_measured_in_turn_and_each_begins_once() -> None:
    """Every round starts with a different variant, and warm-up rounds do not count."""
    calls: list[tuple[str, int]] = []

    def variant(name: str) -> float:
        calls.append((name, len(calls)))
        return float(len(calls))

    found = interleaved({"a": lambda n: variant("a"), "b": lambda n: variant("b")}, 3, warm_up=1)
    assert [name for name, _ in calls] == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert [sample["seconds"] for sample in found["a"].samples] == [3.0, 6.0, 7.0]
    assert found["a"].median() == 6.0


def test_several_numbers_of_one_measurement() -> None:
    """A variant may measure more than its time. Each measured name has its own median."""
    found = interleaved({"a": lambda n: {"seconds": 1.0, "peak": float(n)}}, 3)
    assert (found["a"].median("peak"), found["a"].largest("peak")) == (1.0, 2.0)


@pytest.mark.parametrize(("share", "expected"), [(0, 1.0), (0.5, 2.5), (1, 4.0), (0.75, 3.25)])
def test_percentiles_lie_between_neighbours(share: float, expected: float) -> None:
    """Percentiles follow the usual definition."""
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_a_percentile_of_nothing_is_refused() -> None:
    """A percentile of no values is an error instead of a meaningless number."""
    with pytest.raises(ValueError, match="needs values"):
        percentile([], 0.5)


def test_every_case_of_the_table_has_a_function() -> None:
    """Each case has a function whose docstring says what the case measures."""
    for name, (_, must) in registry.TABLE.items():
        found = registry.find(name)
        assert (found.name, found.must) == (name, must)
        assert found.measure.__doc__


def test_records_are_the_same_in_every_run() -> None:
    """Keys have 16 bytes and values 100. They depend on their number and the seed, and not on the batch size."""
    whole = [pair for batch in records.batches(20_000) for pair in batch]
    later = [pair for batch in records.batches(10_000, start=10_000) for pair in batch]
    assert whole[10_000:] == later
    assert len({key for key, _ in whole}) == 20_000
    assert {(len(key), len(value)) for key, value in whole} == {(16, 100)}
    assert next(records.batches(10, seed=1))[0][1] != whole[0][1]


def test_updates_are_of_existing_keys_and_new_values() -> None:
    """Updates change the requested number of keys, or all keys if there are fewer."""
    changed = records.updates(50, of=100, seed=3)
    assert len({key for key, _ in changed}) == 50
    assert {key for key, _ in changed} <= {records.key(number) for number in range(100)}
    assert len(records.updates(50, of=20, seed=3)) == 20


def test_the_summary_names_what_was_missed() -> None:
    """The summary lists the required cases that missed, the others that missed, and those that missed by too much."""
    target = Target("at most", 1)
    lines = [
        compared("commit-idle", 2.0, "s", "r", 1.0, target),
        compared("store-calls", 1.5, "s", "r", 1.0, target),
        compared("store-calls", 1.1, "s", "r", 1.0, target),
        compared("backup-s3", 1.0, "s", "r", 1.0, target),
    ]
    text = render.summary(lines, {"commit-idle"})
    assert "were not: commit-idle" in text
    assert "1 of the others missed (allowed: 3): store-calls" in text
    assert "store-calls by more than 25%" in text
    assert render.missed_cases(lines) == {"commit-idle": 1.0, "store-calls": 0.5}


def test_the_summary_claims_only_what_was_measured() -> None:
    """A required case that failed, that has no reference or of which there is no line is named as not measured."""
    target = Target("at most", 1)
    reached = [compared(name, 1.0, "s", "r", 1.0, target) for name in ("commit-idle", "peak-memory")]
    without = compared("commit-bytes", 1.0, "s", "r", None, target)
    must = {"commit-idle", "peak-memory"}
    assert render.summary(reached, must) == "all that must be reached were"
    assert render.summary([], must) == "must be reached and were not measured: commit-idle, peak-memory"
    assert render.summary(reached, must, ["commit-idle"]) == "must be reached and were not measured: commit-idle"
    assert render.summary([*reached, without], {"commit-bytes"}).endswith("not measured: commit-bytes")


def test_a_small_commit_is_compared_with_its_own_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of ``commit-bytes`` are compared with those of as many updates as the commits of this size have."""
    series = Series([{"seconds": 1.0, "bytes": 3000.0}])
    monkeypatch.setattr(segments, "_of_sizes", lambda session: {"large": series})
    task: Any = Mock()
    with Session(Plan(work=tmp_path, scale=SMALL)) as session:
        (line,) = segments.commit_bytes(session)
        segments._update(session, task, Mock(records=10_000), 0)
    (pairs,) = task.store.return_value.put_many.call_args.args
    assert line.result.reference_value == sum(len(key) + len(value) for key, value in pairs) / 1e6


def test_markdown_has_a_row_for_each_line() -> None:
    """Each row has every column of the table."""
    text = render.markdown([alone("peak-memory", 1234.5, "MB", "a | restore")])
    header, rule, row = text.splitlines()
    assert header.count("|") == rule.count("|") == len(render.HEADERS) + 1
    assert "1,234" in row


def test_the_table_replaces_what_is_between_its_markers(tmp_path: Path) -> None:
    """The rest of the page stays as it is. A page without markers is refused."""
    path = tmp_path / "page.md"
    path.write_text("nothing here")
    order = ["restore-s3", "peak-memory", "verify"]
    with pytest.raises(InvalidError, match="no place"):
        render.Page(path, 3, order)

    path.write_text(f"before\n{render.BEGIN}\nold\n{render.END}\nafter\n")
    render.Page(path, 3, order).write([alone(name, 1.0, "MB", "a restore") for name in order])
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{render.END}\nafter\n")
    assert "old" not in text
    assert "3 rounds" in text
    assert "| peak-memory | 1 | MB |" in text
    assert "other runs" not in text


def test_each_case_is_written_down_as_soon_as_it_is_measured(tmp_path: Path) -> None:
    """A run that is cut off leaves a page with its lines next to the older ones, and says which lines are fewer."""
    path = tmp_path / "page.md"
    path.write_text(f"{render.BEGIN}\n{render.END}")
    order = ["restore-s3", "peak-memory", "verify"]
    render.Page(path, 3, order).write([alone(name, 1.0, "MB", "a restore") for name in order])
    lines = []
    page = render.Page(path, 5, order)
    for name in ("verify", "restore-s3"):
        lines.append(alone(name, 2.0, "MB", "more"))
        page.write(lines)
        values = {row.split()[1]: row.split()[3] for row in path.read_text().splitlines() if row.startswith("| ")}
        measured = {line.result.case for line in lines}
        assert values == {"case": "value", "---": "---"} | {one: "2" if one in measured else "1" for one in order}
        if len(lines) == 1:
            assert path.read_text().count("other runs than the rest: `verify`.") == 1
            assert "3 rounds" in path.read_text()
    assert list(values) == ["case", "---", *order]
    assert "5 rounds" in path.read_text()
    assert path.read_text().count("other runs than the rest: `peak-memory`.") == 1
    page.write([*lines, alone("peak-memory", 2.0, "MB", "more")])
    assert "other runs" not in path.read_text()
    assert "5 rounds" in path.read_text()


def test_a_line_of_rounds_has_the_median_of_their_ratios() -> None:
    """The ratio is not that of the medians, and the spread has the smallest and the largest one."""
    line = of_rounds("spark-large", "ms", "Spark", [(1.0, 2.0), (3.0, 3.0), (8.0, 10.0)], Target("at most", 0.8))
    assert (line.result.value, line.result.reference_value, line.result.ratio) == (3.0, 3.0, 0.8)
    assert line.result.reached is True
    assert "0.8 (0.5–1)" in render.cells(line)
    assert line.result.to_dict()["spread"] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("method", "url", "kind"),
    [
        ("PUT", "http://h/b/k", "PUT"),
        ("GET", "http://h/b/k", "GET"),
        ("GET", "http://h/b?list-type=2&prefix=x", "LIST"),
        ("GET", "http://h/b?uploads", "LIST"),
        ("DELETE", "http://h/b/k", "DELETE"),
        ("DELETE", "http://h/b/k?tagging", "UNTAG"),
        ("POST", "http://h/b?delete", "DELETE"),
        ("HEAD", "http://h/b/k", "HEAD"),
    ],
)
def test_requests_are_told_apart_by_method_and_query(method: str, url: str, kind: str) -> None:
    """Removing a tag is not a DELETE, and every kind of listing is a LIST."""
    assert kind_of(method, url) == kind


def test_latencies_meet_their_quantiles() -> None:
    """A latency is exact at the given quantiles and interpolated between them. Samples follow the same distribution."""
    assert [round(FLIP_158.at(share), 3) for share in (0.5, 0.99, 0.999)] == [0.459, 1.57, 3.2]
    assert 0.459 < FLIP_158.at(0.7) < 0.74
    source = random.Random(1)
    drawn = [FLIP_158.sample(source) for _ in range(20_000)]
    assert percentile(drawn, 0.5) == pytest.approx(0.459, rel=0.02)
    assert percentile(drawn, 0.99) == pytest.approx(1.57, rel=0.1)
    assert [fixed(0.02).sample(source) for _ in range(3)] == pytest.approx([0.02] * 3)


def test_a_slow_proxy_passes_requests_on_and_lets_answers_wait() -> None:
    """The proxy keeps the method, path, body and answer. It delays the answer by at least the latency."""
    with SlowProxy("http://unused", None) as idle:
        assert idle.endpoint.startswith("http://127.0.0.1:")
    with _Echo() as echo, SlowProxy(echo.endpoint, fixed(0.05)) as proxy:
        start = time.monotonic()
        with urllib.request.urlopen(
            urllib.request.Request(f"{proxy.endpoint}/b/k?x=1", b"body", method="PUT")
        ) as answer:
            assert answer.read() == b"PUT /b/k?x=1 body"
        assert time.monotonic() - start >= 0.05


class _Echo(SlowProxy):
    """A server that answers each request with the request itself."""

    def __init__(self) -> None:
        super().__init__("http://unused", None)
        self._server.RequestHandlerClass = _EchoHandler


class _EchoHandler(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        content = f"{self.command} {self.path} ".encode() + body
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Log nothing."""


@pytest.mark.long
def test_a_plot_is_a_file_of_the_kind_that_its_name_says(tmp_path: Path) -> None:
    """The file's suffix decides its format. Curves may run over numbers or over names."""
    pictures = [
        Picture(title="t", x="MiB", curves=[Curve(label="a", points=[(1, 0.5), (10, 0.7)])]),
        Picture(title="u", x="latency", curves=[Curve(label="b", points=[("none", 1.0)])], logarithmic=False),
    ]
    plots.draw(pictures, tmp_path / "p.svg")
    plots.draw(pictures, tmp_path / "p.png")
    assert "<svg" in (tmp_path / "p.svg").read_text()
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_fresh_process_tells_its_own_peak(tmp_path: Path) -> None:
    """A new process reports its own peak and not that of its large parent. A failure says what went wrong."""
    ballast = bytearray(300_000_000)
    ballast[::4096] = b"x" * len(ballast[::4096])
    (tmp_path / "file").write_bytes(b"x")
    found = in_fresh_process("statemgr_tools.bench.operations:hash_files", directory=str(tmp_path))
    assert 10_000_000 < found["peak_bytes"] < 200_000_000
    with pytest.raises(MeasurementFailed, match="No such file"):
        in_fresh_process("statemgr_tools.bench.operations:hash_files", directory=str(tmp_path / "missing"))


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    """The next run removes what a killed run left, and leaves runs in progress alone."""
    dead = tmp_path / "run-dead"
    dead.mkdir()
    (dead / "owner.json").write_text("[1, 0.0]")
    (tmp_path / "peers").mkdir()
    with Session(Plan(work=tmp_path)) as first, Session(Plan(work=tmp_path)) as second:
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"peers", first.directory.name, second.directory.name}


def test_a_run_leaves_nothing_on_given_servers(tmp_path: Path, kafka: KafkaServer, s3: S3Server) -> None:
    """The run writes below its own prefix of the bucket. At its end it deletes that, and the topics with its name."""
    given = job_mapping(kafka, tmp_path, s3=s3)
    other, shared = kafka.fresh_name("run"), str(given["blob.store.uri"]).rpartition("/")[2]
    client = s3.client()
    (tmp_path / "file").write_bytes(b"x")

    def keys() -> list[str]:
        found = client.list_objects_v2(Bucket=s3.bucket, Prefix=f"{shared}/").get("Contents", ())
        return [one["Key"].removeprefix(f"{shared}/") for one in found]

    with Session(Plan(work=tmp_path / "work", given=given)) as session:
        run, address = session.directory.name, session.servers.s3()
        mine = session.job("mine")
        for name in ("put-0", "put-01"):
            plain_s3.put(asdict(address), [str(tmp_path / "file")], name)
        assert keys() == [f"{run}/put-0/file", f"{run}/put-01/file"]
        address.remove("put-0")
        assert keys() == [f"{run}/put-01/file"]
        client.put_object(Bucket=s3.bucket, Key=f"{shared}/{run}2/file", Body=b"x")
        with TopicAdmin(mine, SystemClock()) as admin:
            admin.create_missing([replace(checkpoint_topic_spec(mine), name=other), checkpoint_topic_spec(mine)])
    assert keys() == [f"{run}2/file"]
    with TopicAdmin(mine, SystemClock()) as admin:
        admin.wait_until_gone(mine.checkpoint_topic)
        assert admin.exists(other)


def test_what_a_run_cannot_remove_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error would leave the command without its summary and verdict, after hours."""
    keys = {"endpoint": "http://localhost:1", "access.key": "a", "secret.key": "s"}
    given = {"blob.store.uri": "s3://bucket/p", **{f"blob.store.s3.{key}": keys[key] for key in keys}}

    def refuse(*_: object) -> None:
        raise UnavailableError("no answer")

    monkeypatch.setattr(S3Address, "remove", refuse)
    monkeypatch.setattr(Servers, "_delete_topics", refuse)
    with Session(Plan(work=tmp_path, given={**given, "kafka.bootstrap.servers": "localhost:1"})) as session:
        assert session.servers.s3()
        assert session.servers.kafka()
    assert capsys.readouterr().err.count("not removed: no answer") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["endpoint", "access.key", "secret.key"])
def test_a_given_bucket_needs_its_server_and_keys(tmp_path: Path, missing: str) -> None:
    """Plain code and peers use the same server. What boto3 might find elsewhere is asked for by its key."""
    keys = {"endpoint": "http://localhost:1", "access.key": "a", "secret.key": "s"}
    given = {"blob.store.uri": "s3://bucket/p", **{f"blob.store.s3.{k}": keys[k] for k in keys if k != missing}}
    with Session(Plan(work=tmp_path, given=given)) as session, pytest.raises(ConfigError, match=f"s3.{missing}"):
        session.servers.s3()


def test_sizes_are_scaled_and_never_above_the_table(tmp_path: Path) -> None:
    """A small run measures less, and no run measures more than the table says."""
    with Session(Plan(work=tmp_path, scale=SMALL)) as session:
        assert session.bytes(2**30) == 2**21
        assert session.count(1000, least=100) == 100
        assert session.count(5, least=100) == 5
    with Session(Plan(work=tmp_path, scale=3.0)) as session:
        assert (session.bytes(2**30), session.count(1000), session.full) == (2**30, 1000, True)
    assert list(tmp_path.iterdir()) == [], "a run leaves nothing behind"
