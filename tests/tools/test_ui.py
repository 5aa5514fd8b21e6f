"""`statemgr ui` next to a running job: over HTTP with a parser, and in a real browser if one is installed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from html import unescape
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urljoin

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager, Task
from statemgr.cli.main import cli
from statemgr.model import codecs
from statemgr.telemetry.threaded_http import QuietHandler
from statemgr_tools.ui.model import JobView
from statemgr_tools.ui.server import LOOPBACK, Application, make
from tests.browser import ENTER, NAME, TAB, Browser, browser, is_installed
from tests.jobs import SEGMENTS, job_mapping, with_changes
from tests.kafka_jobs import a_record, committed, job, make_topic, make_topics, send, wait_until
from tests.servers import KafkaServer

# one worker, because each would set up the fixtures of this module
pytestmark = pytest.mark.xdist_group("ui")
SECRET = "hunter2-do-not-show"
EVIL = "<script>alert(1)</script>\"'&"
KEYS = {f"key-{i:03}".encode(): f"value {i}".encode() for i in range(120)} | {EVIL.encode(): f"<b>{EVIL}</b>".encode()}
_VOID = {"input", "link", "meta", "rect", "line"}
Element = tuple[str, dict[str, str | None]]


class Document(HTMLParser):
    """A parsed page. Unbalanced elements are an error."""

    def __init__(self, status: int, headers: dict[str, str], body: str) -> None:
        super().__init__()
        self.status, self.headers, self.body = status, headers, body
        self.elements: list[Element] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(body)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element without content."""
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Check that the tag ends the element that began last."""
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Collect the text."""
        self.words.append(data)

    @property
    def text(self) -> str:
        """All texts, one per line."""
        return "\n".join(self.words)

    def all(self, name: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements with this name."""
        return [attributes for tag, attributes in self.elements if tag == name]

    def link(self, start: str) -> str:
        """Return the address of the first link that starts with this text."""
        return next(str(a["href"]) for a in self.all("a") if str(a["href"]).startswith(start))


class Site:
    """A running server and its client."""

    def __init__(self, port: int, view: JobView) -> None:
        self.port, self.view = port, view
        self.address = f"http://127.0.0.1:{port}"

    def ask(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Document:
        """Send one request; ``_`` in a header's name stands for ``-``."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        with closing(connection):
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return Document(answer.status, dict(answer.getheaders()), answer.read().decode())

    def done(self, kind: str) -> Document:
        """Press a button on the page of blobs and wait for the result."""
        assert self.ask("/0/run", "POST", urlencode({"kind": kind})).status == 303
        wait_until(lambda: self.view.runs[kind].ended_ms is not None)
        return self.ask("/0/blobs")


@contextmanager
def served(config: JobConfig, **options: Any) -> Iterator[Site]:
    """Serve the pages of a job on a free port."""
    hosts = {*LOOPBACK, NAME}
    with closing(JobView(config, **options)) as view, make("127.0.0.1", 0, Application([view], hosts)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield Site(server.server_port, view)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory in which the job of this module keeps its state and its blobs."""
    return tmp_path_factory.mktemp("ui")


@pytest.fixture(scope="module")
def config(kafka: KafkaServer, directory: Path) -> JobConfig:
    """Create a job of two tasks with segments on top of snapshots."""
    more = {"kafka__ssl__key__password": SECRET, "metrics__port": 0, "stores__totals__value__serde": "string"}
    return JobConfig.from_mapping(job_mapping(kafka, directory, tasks=2, kind=SEGMENTS, **more))


@pytest.fixture(scope="module")
def manager(config: JobConfig) -> Iterator[StateManager]:
    """Run the manager of the job."""
    with StateManager(config) as manager:
        yield manager


@pytest.fixture(scope="module")
def tasks(manager: StateManager, config: JobConfig) -> list[Task]:
    """Open the tasks: `Partition 0` has 121 keys, one of them hostile; both have three checkpoints."""
    make_topic(config, source := f"{config.job_name}-in", 2)
    found = [manager.open_task(f"Partition {number}") for number in range(2)]
    for number, task in enumerate(found):
        totals = task.store("totals", key_serde="bytes", value_serde="bytes")
        for step in range(3):
            totals.put_many(
                list(KEYS.items())[step * 50 : step * 50 + 50] if number == 0 else [(b"other", b"%d" % step)]
            )
            task.commit({f"{source}-{number}": 0})
    return found


@pytest.fixture(scope="module")
def site(config: JobConfig, manager: StateManager, tasks: list[Task]) -> Iterator[Site]:
    """Serve the pages of the running job."""
    with served(config, metrics=[f"http://127.0.0.1:{manager.metrics.port}/metrics"]) as site:
        yield site


def store_path(**more: str) -> str:
    """Return the address of the store of `Partition 0`."""
    return "/0/store?" + urlencode({"task": "Partition 0", "store": "totals", **more})


def every_page(site: Site) -> dict[str, Document]:
    """Return pages of all kinds, including an error."""
    paths = [
        "/0/",
        "/0/task?" + urlencode({"task": "Partition 0"}),
        "/0/task?" + urlencode({"task": "Partition 9"}),
        store_path(),
        store_path(prefix=""),
        store_path(key=EVIL),
        "/0/blobs",
    ]
    return {path: site.ask(path) for path in paths}


# --- what the pages show ------------------------------------------------------------------------------------


def test_tasks_and_the_checkpoints_of_a_task(site: Site, tasks: list[Task]) -> None:
    """The first page leads to each task, whose page shows its checkpoints, its stores and the phases of its commits."""
    assert site.ask("/").headers["Location"] == "/0/"
    first = site.ask("/0/")
    assert first.status == 200
    assert "2 of 2" in first.text
    assert "Restores, by backend and reason" in first.text
    assert "backend=empty, reason=new" in first.text
    assert "statemgr_restore_progress_ratio" not in first.text, "none is in progress"
    assert "Failures, by the class of the error" in first.text
    task = site.ask(urljoin("/0/", first.link("task?task=Partition+0")))
    newest = tasks[0].last_checkpoint
    assert newest is not None
    assert f"{newest.checkpoint_id} (current)" in task.text
    assert "blob-store" in task.text
    assert "up to offset" in task.text
    assert "does not say how long the phases" in task.text
    assert "Seconds of the last commit, by phase" in task.text
    assert "statemgr_commit_seconds" in task.text
    assert {figure["role"] for figure in task.all("svg")} == {"img"}


def test_an_unknown_task_is_404_with_a_hint(site: Site) -> None:
    """The error says what to do."""
    found = site.ask("/0/task?" + urlencode({"task": "Partition 9"}))
    assert found.status == 404
    assert "statemgr checkpoints list" in found.text


def test_a_scan_goes_page_by_page_through_all_keys(site: Site) -> None:
    """No key is missing or shown twice, and no page has more than fifty keys."""
    path, seen = store_path(prefix=""), []
    while True:
        found = site.ask(path)
        cells = re.findall(r"<tr><td><code>(.*?)</code>", found.body)
        assert 0 < len(cells) <= 50
        seen += [unescape(cell) for cell in cells]
        following = [str(a["href"]) for a in found.all("a") if "after=" in str(a["href"])]
        if not following:
            break
        path = urljoin(path, following[0])
    assert seen == sorted(key.decode() for key in KEYS)


def test_a_key_is_looked_up_at_a_checkpoint(site: Site, tasks: list[Task]) -> None:
    """The page shows the value at the current checkpoint, and says so if a key does not exist at a checkpoint."""
    assert "value 7" in site.ask(store_path(key="key-007")).text
    assert "no key nothing" in site.ask(store_path(key="nothing")).text
    assert "read as hexadecimal" in site.ask(store_path(key="0x6b65")).text
    older = site.view.record("Partition 0").checkpoints[-1]
    assert "no key key-110" in site.ask(store_path(key="key-110", checkpoint=str(older.checkpoint_id))).text
    assert len(re.findall("<code>", site.ask(store_path(prefix="key-01")).body)) == 20


def test_a_store_that_is_too_large_is_not_restored(config: JobConfig, tasks: list[Task]) -> None:
    """A click never fetches more than the limit, and the hint names the option."""
    with served(config, most_bytes=10) as site:
        found = site.ask(store_path(key="key-007"))
    assert found.status == 400
    assert "--most-bytes" in found.text


def test_verify_and_bytes_at_a_click(site: Site, directory: Path) -> None:
    """The page reports that all blobs exist, sorts bytes by kind, and names a blob that is lost."""
    assert "All blobs exist" in site.done("verify").text
    assert "needed by a current checkpoint" in site.done("blobs").text
    counted = site.view.runs["blobs"].result
    assert 0 < counted.live <= sum(count.size for count in counted.report.counts.values())  # type: ignore[union-attr]
    blob = max((directory / "blobs").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    away = blob.rename(directory / "away")
    try:
        assert blob.name in site.done("verify").text
    finally:
        away.rename(blob)
    assert "All blobs exist" in site.done("verify").text


def test_metrics_that_cannot_be_read_are_a_note(config: JobConfig, tasks: list[Task]) -> None:
    """The page of tasks is still shown, and says that nothing is known of the process, not that it reports nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with served(config, metrics=[f"http://127.0.0.1:{free.getsockname()[1]}/metrics"]) as site:
            found = site.ask("/0/")
    assert found.status == 200
    assert "cannot be read" in found.text
    assert "Not known: 1 process could not be asked." in found.text
    assert "The processes report none." not in found.text


def test_a_thousand_tasks_are_shown_a_hundred_at_a_time(kafka: KafkaServer) -> None:
    """Each page is bounded, and links lead through all of them."""
    config = job(kafka, job__tasks=1000, stores__totals__backup__factories=[])
    make_topics(config)
    records = [a_record(config, n + 1, f"Partition {n}", input_offsets={}) for n in range(1000)]
    send(config, config.checkpoint_topic, [pair for record in records for pair in codecs.encode_record(record)])
    with served(config) as site:
        path, seen = "/0/?sort=task", []
        while True:
            found = site.ask(path)
            rows = re.findall(r"<tr><td><a href=\"task\?task=Partition\+(\d+)\"", found.body)
            assert len(rows) == 100
            seen += rows
            following = [str(a["href"]) for a in found.all("a") if "start=" in str(a["href"])]
            path = urljoin("/0/", following[-1])
            if len(seen) == 1000:
                break
    assert seen == [str(number) for number in range(1000)]


# --- what the pages must not do -----------------------------------------------------------------------------


def test_no_value_becomes_markup(site: Site) -> None:
    """Keys, values and parameters stay text, even in attributes."""
    for path, found in every_page(site).items():
        assert not found.all("script"), path
        assert not found.all("b"), path
        assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")], path
    looked_up = site.ask(store_path(key=EVIL))
    assert EVIL in looked_up.text
    assert {attributes.get("value") for attributes in looked_up.all("input")} >= {EVIL}


def test_no_secret_is_shown(site: Site, config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a page nor an error of the broker's client shows a secret."""
    assert [path for path, found in every_page(site).items() if SECRET in found.body] == []
    monkeypatch.setattr("statemgr.kafka.metadata.DEADLINE_S", 1.0)
    monkeypatch.setattr("statemgr.kafka.metadata.REQUEST_S", 1.0)
    with served(with_changes(config, kafka__bootstrap__servers="localhost:1")) as gone:
        found = gone.ask("/0/")
    assert found.status == 503
    assert SECRET not in found.body


def test_nothing_is_written_and_no_owner_is_fenced(
    site: Site, config: JobConfig, tasks: list[Task], directory: Path
) -> None:
    """All pages and checks leave Kafka and the blobs unchanged, and the owners continue."""

    def state() -> tuple[object, object]:
        blobs = {path: path.stat().st_mtime_ns for path in (directory / "blobs").rglob("*") if path.is_file()}
        return blobs, committed(config, config.checkpoint_topic)

    before = state()
    every_page(site)
    site.done("verify")
    site.done("blobs")
    assert state() == before
    for task in tasks:
        task.store("totals", key_serde="bytes", value_serde="bytes").put(b"more", b"1")
        task.commit(dict(task.last_checkpoint.input_offsets))  # type: ignore[union-attr]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]", ""])
def test_another_host_name_is_refused(site: Site, host: str) -> None:
    """A request with another name that resolves to this machine (DNS rebinding) gets no data."""
    found = site.ask("/0/", Host=host)
    assert found.status == 421
    assert "Partition" not in found.body
    assert "localhost" in LOOPBACK
    assert site.ask("/0/", Host=f"LOCALHOST:{site.port}").status == 200


@pytest.mark.parametrize("name", ["page.example:8640", "https://page.example", "::1"])
def test_a_host_name_that_no_request_has_is_refused(name: str) -> None:
    """A port or a scheme would never match, and each request would be refused."""
    refused = CliRunner().invoke(cli, ["ui", "--allow-host", name])
    assert (refused.exit_code, "leave out the scheme and the port" in refused.stderr) == (2, True)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(site: Site, method: str) -> None:
    """The server has nothing to write to."""
    assert site.ask("/0/", method).status == 405


@pytest.mark.parametrize(
    "headers",
    [{"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"}, {"Origin": "http://evil.example"}],
    ids=str,
)
def test_another_site_cannot_make_the_browser_start_work(site: Site, headers: dict[str, str]) -> None:
    """Another site can start neither a check of the blob store nor the restore of a store."""
    before = dict(site.view.runs)
    assert site.ask("/0/run", "POST", "kind=verify", **headers).status == 403
    assert site.ask(store_path(key="key-007"), **headers).status == 403
    assert site.view.runs == before


@pytest.mark.parametrize("length", ["9" * 5000, "²", "-1"])
def test_a_length_that_is_no_length_is_refused(site: Site, length: str) -> None:
    """Python converts neither five thousand digits nor a digit without a value. Neither is an error of the server."""
    with closing(HTTPConnection("127.0.0.1", site.port, timeout=120)) as connection:
        connection.putrequest("POST", "/0/run")
        connection.putheader("Content-Length", length.encode("latin-1"))
        connection.endheaders()
        assert connection.getresponse().status == 403


def test_a_body_that_never_comes_is_a_timeout(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is no error of the server, and leaves no trace on standard error."""
    monkeypatch.setattr(QuietHandler, "timeout", 0.2)
    with closing(HTTPConnection("127.0.0.1", site.port, timeout=120)) as connection:
        connection.putrequest("POST", "/0/run")
        connection.putheader("Content-Length", "20")
        connection.endheaders(b"kind=")
        assert connection.getresponse().status == 408
    assert capfd.readouterr().err == ""


def test_every_answer_has_the_headers_that_limit_a_page(site: Site) -> None:
    """Every answer forbids scripts, frames, content from elsewhere, and caching."""
    for found in (site.ask("/0/"), site.ask("/style.css"), site.ask("/nothing"), site.ask("/0/", Host="evil.example")):
        assert "default-src 'none'" in found.headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in found.headers["Content-Security-Policy"]
        assert found.headers["X-Content-Type-Options"] == "nosniff"
        assert found.headers["Cache-Control"] == "no-store"


def test_rules_of_accessibility(site: Site) -> None:
    """Pages have landmarks, one heading, and named fields, tables, charts and regions, and load nothing from
    elsewhere."""
    for path, found in every_page(site).items():
        names = [name for name, _ in found.elements]
        assert found.all("html")[0]["lang"] == "en", path
        assert (names.count("h1"), names.count("main")) == (1, 1), path
        assert names[: names.index("body")].count("title") == 1, path
        assert "width=device-width" in str([meta.get("content") for meta in found.all("meta")]), path
        assert found.link("#main") == "#main", path
        assert all(element["aria-label"] for element in found.all("svg") + found.all("nav")), path
        assert all(cell["scope"] == "col" for cell in found.all("th")), path
        assert names.count("table") == names.count("caption"), path
        assert {box["tabindex"] for box in found.all("div") if "tabindex" in box} <= {"0"}, path
        visible = [field for field in found.all("input") if field.get("type") != "hidden"]
        assert len(visible) == names.count("label"), path
        addresses = [attributes.get(name) for _, attributes in found.elements for name in ("src", "href", "action")]
        assert not [address for address in addresses if address and ("//" in address or ":" in address)], path


def test_the_command_serves_until_it_is_stopped(config: JobConfig, tasks: list[Task], tmp_path: Path) -> None:
    """The command prints its address, answers there, ends with status 0 on SIGTERM, and leaves no restored store."""
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in config.to_mapping().items()]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    (temporary := tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "statemgr", "ui", "--port", "0", "--json"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            said = "".join(child.stdout.readline() for _ in range(3))
            port = int(json.loads(said)["address"].rstrip("/").rpartition(":")[2])
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", store_path(key="key-007"))
            assert "value 7" in connection.getresponse().read().decode()
            connection.close()
            assert list(temporary.iterdir())
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0
        finally:
            child.kill()
    assert list(temporary.iterdir()) == []


# --- in a browser -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    """Start a headless browser."""
    if not is_installed():
        pytest.skip("no Chromium with chromedriver: apt-get install chromium chromium-driver")
    with browser() as window:
        yield window


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(360, True, id="phone-dark"),
        pytest.param(1280, False, id="desk-light"),
        pytest.param(360, False, id="phone-light", marks=pytest.mark.long),
        pytest.param(1280, True, id="desk-dark", marks=pytest.mark.long),
    ],
)
def test_each_page_fits_the_screen_and_can_be_read(window: Browser, site: Site, width: int, dark: bool) -> None:
    """Only tables scroll sideways, texts have contrast, and the browser has no complaint."""
    window.device(width, 800, dark=dark)
    for path in ["/0/", "/0/task?task=Partition+0", store_path(prefix=""), "/0/blobs"]:
        window.open(site.address + path)
        assert window.script("return document.documentElement.scrollWidth") <= width, path
        assert window.script(_CONTRAST) == [], path
        assert window.script(_SMALLEST) >= 44, path
        assert window.log() == [], path
    back = window.script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 200) == dark


def test_a_key_is_found_by_keyboard_alone(window: Browser, site: Site) -> None:
    """The keyboard reaches the skip link, a task, its store and the field for a key. The links have a visible focus."""
    window.device(1280, 800)
    window.open(site.address + "/0/")
    window.keys(TAB)
    assert window.script("return document.activeElement.textContent") == "Skip to the content"
    assert window.script("return document.activeElement.getBoundingClientRect().left") >= 0
    for wanted, title in (("Partition 0", "Partition 0 of"), ("totals", "Store totals")):
        reach(window, wanted)
        assert window.script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
        window.keys(ENTER)
        wait_until(lambda title=title: title in window.script("return document.title"))  # type: ignore[misc]
    while window.script("return document.activeElement.name") != "key":
        window.keys(TAB)
    window.keys("key-042" + ENTER)
    wait_until(lambda: "value 42" in window.text())


@pytest.mark.parametrize("host", ["127.0.0.1", NAME])
def test_verify_is_one_click_in_a_browser(window: Browser, site: Site, host: str) -> None:
    """The browser sends the form as the page's own, also over http to another name than that of this machine. The page
    reloads itself until the result is there."""
    site.view.runs.clear()
    window.device(1280, 800)
    window.open(f"http://{host}:{site.port}/0/blobs")
    window.click("form:has(input[value=verify]) button")
    wait_until(lambda: "All blobs exist" in window.text())


def test_a_hostile_key_stays_text_in_a_browser(window: Browser, site: Site) -> None:
    """The page shows the key as text, and the browser runs nothing."""
    window.open(site.address + store_path(key=EVIL))
    assert EVIL in window.text()
    assert window.log() == []


def reach(window: Browser, text: str) -> None:
    """Press Tab until a link with this text has the focus."""
    for _ in range(200):
        window.keys(TAB)
        if window.script("return document.activeElement.textContent") == text:
            return
    raise AssertionError(f"Tab does not reach {text}")


#: The height of the smallest button or field, in pixels.
_SMALLEST = """
const fields = [...document.querySelectorAll('button, input:not([type=hidden])')];
return Math.min(44, ...fields.map(e => e.offsetHeight));
"""
#: Texts whose contrast with their background is below 4.5 (WCAG 2.2, success criterion 1.4.3), for opaque colours.
_CONTRAST = """
const linear = n => n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4;
const light = colour => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(n => linear(n / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const back = e => {
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (colour !== 'rgba(0, 0, 0, 0)') return colour;
  }
  return 'rgb(255, 255, 255)';
};
const contrast = e => {
  const style = getComputedStyle(e);
  const [a, b] = [light(e.closest('svg') ? style.fill : style.color), light(back(e))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
};
return [...document.querySelectorAll('body *')]
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && e.checkVisibility())
  .filter(e => contrast(e) < 4.5).map(e => e.tagName + ': ' + e.textContent.slice(0, 40));
"""
