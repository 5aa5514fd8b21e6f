"""The pages. Each one is a function from a job and the parameters of a request to a title and a body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from statemgr.config import StoreConfig
from statemgr.errors import InvalidError, StatemgrError
from statemgr.health.overview import ORDERS, JobOverview, TaskOverview
from statemgr.health.processes import FILL_HEADERS, FILL_METRICS, Fill, Sample
from statemgr.health.verify_blobs import Verified
from statemgr.logs import counted
from statemgr.model.checkpoint import CheckpointRecord
from statemgr.operations.gc.gc import BlobStatus
from statemgr.operations.top.command import seconds
from statemgr.stores.store import after_prefix
from statemgr.terminal.items import parse, render, text, value_serde_of
from statemgr.terminal.output import moment, size
from statemgr_tools.ui.charts import bars, columns
from statemgr_tools.ui.checks import BlobBytes, Run
from statemgr_tools.ui.faults import deeper_checks, names, runbook, wrong
from statemgr_tools.ui.history import Point
from statemgr_tools.ui.markup import Child, Markup, alert, facts, join, prose, table, tag
from statemgr_tools.ui.model import CheckpointLine, Found, JobView

Parameters = Mapping[str, str]
#: Tasks on one page, and in a chart.
_TASKS, _CHARTED = 100, 10
#: Metrics in one table.
_METRICS = 500
#: Seconds after which a waiting page reloads itself.
_BUSY_S = 2
#: Number of characters of a key or a value on a page.
_SHOWN = 2000
_BEHIND_TOPIC = (
    "The checkpoint topic does not say how long the phases of a commit took, or when and why a store was restored. The "
    "owner's metrics have the phases of its last commit, its lag, and its restores by backend and reason; its log has "
    "the reasons in full."
)


@dataclass(frozen=True, slots=True)
class Page:
    """A title, a body, and the seconds until the browser should reload. ``error``: why the page is incomplete."""

    title: str
    body: Markup
    refresh_s: int | None = None
    error: StatemgrError | None = None


def jobs(views: Sequence[JobView]) -> Page:
    """Show all jobs, with a link to each."""
    rows = []
    for view in views:
        view.begin()
    for number, view in enumerate(views):
        link = tag("a", view.config.job_key, href=f"/{number}/")
        look = view.look()
        found = look.overview
        if found is None:
            rows.append([link, "", "", "", names(look.problems)])
        else:
            count = f"{len(found.tasks)} of {found.expected}"
            tasks = sum(1 for task in found.tasks if task.problems)
            more = [f"{tasks} tasks with a problem"] if tasks else []
            wrong_now = ", ".join(filter(None, [names(look.problems), *more]))
            rows.append([link, count, _lag(found.lag), _age(found.oldest_s), wrong_now])
    headers = ("job", "tasks", "lag", "oldest checkpoint", "what is wrong")
    return Page("Jobs", table("Jobs", headers, rows, "no jobs"))


def tasks(view: JobView, given: Parameters) -> Page:
    """Show the tasks of a job by lag, age or number, and charts of the worst."""
    order = given.get("sort", "lag") if given.get("sort", "lag") in ORDERS else "lag"
    start, refresh_s = _number(given, "start", 0, 1_000_000), _number(given, "refresh", 0, 3600)
    look = view.look()
    found = look.overview
    busy = look.waiting_s is not None or any(
        kind in view.runs and view.runs[kind].ended_ms is None for kind in deeper_checks(view)
    )
    again_s = refresh_s or (_BUSY_S if busy else None)
    if found is None:
        hint = view.config.hider()(look.error.hint or "") if look.error is not None else ""
        return Page(view.config.job_key, join([wrong(view, look), tag("p", prose(hint))]), again_s, look.error)
    ordered = found.ordered(order)
    rows = [_task_row(task) for task in ordered[start : start + _TASKS]]
    headers = ("task", "lag", "age", "stage", "owner", "retained", "problem")
    samples, problems = view.samples()
    body = join(
        [
            _job_facts(found),
            wrong(view, look),
            alert([*found.notes, *problems, *_worst(found)]),
            _choices("Sort by", "sort", ORDERS, order, {"refresh": refresh_s or None}),
            _choices("Refresh", "refresh", ("0", "5", "30"), str(refresh_s), {"sort": order}),
            _task_charts(ordered),
            _history(view.history.points),
            table("Tasks, those with a problem first", headers, rows, "The job has no checkpoint yet."),
            _pages(start, len(ordered), {"sort": order}),
            _fills(view.fills()),
            _metrics("Restores, by backend and reason", _restores(samples), len(problems), view),
            _metrics("Failures, by the class of the error", _failures(samples), len(problems), view)
            if view.metrics
            else None,
        ]
    )
    return Page(found.job, body, again_s, look.error)


def task(view: JobView, given: Parameters) -> Page:
    """Show one task: its checkpoints, its input, its stores, and the metrics of its owner. Raises: MissingState."""
    name = given.get("task", "")
    record = view.record(name)
    found = view.overview()
    shown = next((one for one in found.tasks if one.task == name), None)
    gone = view.blobs_gone(record)
    lines = view.timeline(record, with_blobs=gone is None)
    samples, problems = view.samples()
    own = [one for one in samples if one.labels.get("task") == name]
    phases = [one for one in own if one.name == "statemgr_commit_seconds"]
    body = join(
        [
            _task_facts(shown) if shown is not None else None,
            alert(filter(None, [gone, *(shown.problems if shown is not None else ()), *problems, *_damaged(lines)])),
            columns(
                "Bytes uploaded by each checkpoint, over time",
                [(line.published_ms, line.uploaded, _told(line)) for line in reversed(lines)],
            ),
            table(
                "Retained checkpoints, newest first",
                ("checkpoint", "published", "since the one before", "sequence", "epoch", "uploaded", "input offsets"),
                [_checkpoint_row(record, line) for line in lines],
                "",
            ),
            bars("Seconds of the last commit, by phase", _phases(phases)) if phases else None,
            tag("p", _BEHIND_TOPIC, class_="soft"),
            tag("h2", "Input"),
            table(
                "Messages after the checkpoint",
                ("source partition", "next offset", "lag"),
                [
                    (source, offset, _lag(found.lags.get(source)))
                    for source, offset in sorted(record.current.input_offsets.items())[:_TASKS]
                ],
                "The checkpoint has no input offsets.",
            ),
            _more(len(record.current.input_offsets), _TASKS, "source partitions"),
            tag("h2", "Stores"),
            table(
                "Stores in each checkpoint and backend",
                ("checkpoint", "store", "backend", "state", "segments", "uploaded", "where"),
                [_store_row(name, line, number) for line in lines for number in range(len(line.stores))],
                "The checkpoint has no stores.",
            ),
            _metrics("Metrics of the owner", own, len(problems), view),
        ]
    )
    return Page(f"{name} of {view.config.job_key}", body, _number(given, "refresh", 0, 3600) or None)


def store(view: JobView, given: Parameters) -> Page:
    """Show a look-up and a scan of a store at a checkpoint. Raises: InvalidError; as :meth:`JobView.scan`."""
    name, task_name = given.get("store", ""), given.get("task", "")
    config = view.config.stores.get(name)
    if config is None:
        raise InvalidError("the configuration has no such store", hint="follow the link on the page of a task")
    record = view.record(task_name)
    checkpoint_id = given.get("checkpoint") or str(record.current.checkpoint_id)
    same = {"task": task_name, "store": name, "checkpoint": checkpoint_id}
    body = join(
        [
            facts([("task", task_name), ("checkpoint", checkpoint_id), ("keys are", config.key_serde)]),
            _form("Look up a key", "key", given.get("key", ""), same),
            _form("List keys that start with", "prefix", given.get("prefix", ""), same),
            _looked_up(view, config, given, same),
        ]
    )
    return Page(f"Store {name}", body)


def blobs(view: JobView, _: Parameters) -> Page:
    """Show the bytes with the job's prefix by kind, and whether every needed blob is intact."""
    kinds = (
        ("blobs", "Count bytes", _bytes),
        ("verify", "Verify blobs", _verified),
        ("read", "Read and verify all bytes", _verified),
    )
    sections: list[Child] = []
    running = False
    for kind, title, show in kinds:
        run = view.runs.get(kind)
        running |= run is not None and run.ended_ms is None
        sections += [tag("h2", title), _run_button(kind, title, run), _run_state(view, run)]
        if run is not None and run.result is not None:
            sections.append(show(run.result))
    return Page(f"Blobs of {view.config.job_key}", join(sections), _BUSY_S if running else None)


def runbook_page() -> Page:
    """Show what to do about each fault. Raises: MissingError."""
    return Page("Runbook", runbook())


def failed(error: StatemgrError) -> Page:
    """Show an error, with what to do about it."""
    where = facts([(name, value) for name, value in error.where.items() if name != "key"]) if error.where else None
    return Page(
        "This could not be read", join([alert([error.message]), error.hint and tag("p", prose(error.hint)), where])
    )


# --- tasks -------------------------------------------------------------------------------------------------------


def _job_facts(found: JobOverview) -> Markup:
    waiting = [f"{count} {name}" for name, count in (("permits", found.permits), ("offers", found.offers)) if count]
    return facts(
        [
            ("tasks", f"{len(found.tasks)} of {found.expected}"),
            ("lag", _lag(found.lag)),
            ("oldest checkpoint", _age(found.oldest_s)),
            ("published", "all tasks at once" if found.together else "each task by its owner"),
            ("waiting", ", ".join(waiting) or "nothing"),
            ("read at", moment(found.taken_ms)),
        ]
    )


def _worst(found: JobOverview) -> Iterable[Child]:
    bad = [one for one in found.tasks if one.problems]
    for one in bad[:_CHARTED]:
        yield [_task_link(one.task), ": ", "; ".join(one.problems)]
    if len(bad) > _CHARTED:
        yield f"… and {len(bad) - _CHARTED} more tasks with a problem"


def _task_charts(ordered: Sequence[TaskOverview]) -> Child:
    if not ordered:
        return None
    lagging = sorted((one for one in ordered if one.lag), key=lambda one: -(one.lag or 0))[:_CHARTED]
    oldest = sorted(ordered, key=lambda one: -one.age_s)[:_CHARTED]
    charts = {
        "Lag, highest first": [(one.task, float(one.lag or 0), _lag(one.lag)) for one in lagging],
        "Age of the checkpoint, oldest first": [(one.task, one.age_s, seconds(one.age_s)) for one in oldest],
    }
    return [bars(title, rows, _task_address) for title, rows in charts.items() if rows]


def _history(points: Sequence[Point]) -> Child:
    """Show how the job has developed since the page was started. A chart without anything to show is left out."""
    lines: dict[str, list[tuple[float, float, str]]] = {
        "Lag": [],
        "Bytes of state": [],
        "Seconds of the last commit": [],
    }
    for one in points:
        values = (
            (one.lag, _lag(one.lag)),
            (one.state, size(int(one.state or 0))),
            (one.commit_s, seconds(one.commit_s or 0)),
        )
        for line, (value, shown) in zip(lines.values(), values, strict=True):
            if value is not None:
                line.append((one.at_ms, value, f"{moment(one.at_ms)}: {shown}"))
    return [
        columns(f"{title}, since {moment(points[0].at_ms)}", line)
        for title, line in lines.items()
        if len(line) > 1 and any(value for _, value, _ in line)
    ]


def _task_row(one: TaskOverview) -> list[Child]:
    stages = ", ".join(f"{name}: {stage}" for name, stage in one.stages.items())
    problems = "; ".join(one.problems)
    return [_task_link(one.task), _lag(one.lag), seconds(one.age_s), stages, one.owner, one.retained, problems]


def _task_link(name: str) -> Markup:
    return tag("a", name, href=_task_address(name))


def _task_address(name: str) -> str:
    return "task?" + urlencode({"task": name})


def _pages(start: int, count: int, same: Mapping[str, str]) -> Child:
    links = []
    for name, there in (("Previous", start - _TASKS), ("Next", start + _TASKS)):
        if 0 <= there < count:
            links.append(tag("a", name, href="?" + urlencode({**same, "start": there})))
    return tag("nav", *links, aria_label="Pages") if links else None


def _choices(title: str, key: str, choices: Sequence[str], chosen: str, same: Mapping[str, object]) -> Markup:
    kept = {name: value for name, value in same.items() if value is not None}
    names = {"0": "off", "5": "every 5 s", "30": "every 30 s"}
    links = [
        tag(
            "a",
            names.get(choice, choice),
            href="?" + urlencode({**kept, key: choice}),
            aria_current="true" if choice == chosen else None,
        )
        for choice in choices
    ]
    return tag("nav", tag("span", title, class_="soft"), *links, aria_label=title)


# --- a task ------------------------------------------------------------------------------------------------------


def _task_facts(one: TaskOverview) -> Markup:
    return facts(
        [
            ("lag", _lag(one.lag)),
            ("age of the checkpoint", seconds(one.age_s)),
            ("stage", ", ".join(f"{name}: {stage}" for name, stage in one.stages.items())),
            ("owner", one.owner),
            ("epoch", one.epoch),
            ("retained", one.retained),
        ]
    )


def _told(line: CheckpointLine) -> str:
    return f"{line.checkpoint.checkpoint_id} at {moment(line.published_ms)}: {size(line.uploaded)}"


def _checkpoint_row(record: CheckpointRecord, line: CheckpointLine) -> list[Child]:
    one = line.checkpoint
    marks = ["current"] * (one is record.current) + ["kept"] * (str(one.checkpoint_id) in record.current.kept)
    name = f"{one.checkpoint_id} ({', '.join(marks)})" if marks else str(one.checkpoint_id)
    offsets = sorted(one.input_offsets.items())
    more = f" and {len(offsets) - 3} more" if len(offsets) > 3 else ""
    return [
        name,
        moment(line.published_ms),
        "" if line.gap_s is None else seconds(line.gap_s),
        one.sequence,
        one.epoch,
        size(line.uploaded),
        ", ".join(f"{source}: {offset}" for source, offset in offsets[:3]) + more,
    ]


def _store_row(task_name: str, line: CheckpointLine, number: int) -> list[Child]:
    one, checkpoint_id = line.stores[number], str(line.checkpoint.checkpoint_id)
    query = urlencode({"task": task_name, "store": one.store, "checkpoint": checkpoint_id})
    return [
        checkpoint_id,
        tag("a", one.store, href=f"store?{query}"),
        one.factory,
        "" if one.size is None else size(one.size),
        "" if one.segments is None else one.segments,
        "" if one.uploaded is None else size(one.uploaded),
        one.problem or one.where,
    ]


def _damaged(lines: Iterable[CheckpointLine]) -> Iterable[str]:
    for line in lines:
        for one in line.stores:
            if one.problem:
                yield f"{one.store} of {line.checkpoint.checkpoint_id} in {one.factory}: {one.problem}"


def _phases(samples: Iterable[Sample]) -> list[tuple[str, float, str]]:
    return [(one.labels.get("phase", ""), one.value, f"{one.value * 1000:.1f} ms") for one in samples]


def _restores(samples: Iterable[Sample]) -> list[Sample]:
    """Show the finished restores by backend, and those in progress."""
    found = [one for one in samples if "restore" in one.name and one.name not in FILL_METRICS]
    return [one for one in found if one.name != "statemgr_restore_progress_ratio" or one.value != 1]


def _fills(found: Sequence[Fill]) -> Child:
    """Show the stores that are open while something of them is still to come."""
    rows = [one.cells() for one in found]
    return table("Stores that work while the rest of them is fetched", FILL_HEADERS, rows, "") if rows else None


def _failures(samples: Iterable[Sample]) -> list[Sample]:
    return [one for one in samples if one.name == "statemgr_failures_total" and one.value]


def _metrics(title: str, samples: Sequence[Sample], silent: int, view: JobView) -> Child:
    """``silent``: how many processes could not be asked."""
    if not view.metrics:
        return tag(
            "p", f"{title}: start the page with --metrics to see what the job's processes report.", class_="soft"
        )
    rows = []
    for one in samples[:_METRICS]:
        labels = ", ".join(f"{name}={value}" for name, value in one.labels.items() if name not in ("job", "task"))
        rows.append((one.name, labels, f"{one.value:g}"))
    nothing = "The processes report none."
    if silent:
        nothing = f"Not known: {counted(silent, 'process', 'processes')} could not be asked."
    shown = table(title, ("metric", "labels", "value"), rows, nothing)
    return [tag("h2", title), shown, _more(len(samples), _METRICS, "metrics")]


def _more(count: int, shown: int, what: str) -> Child:
    """What a bounded table leaves out."""
    return tag("p", f"{count - shown:,} more {what} are not shown.", class_="soft") if count > shown else None


# --- a store -----------------------------------------------------------------------------------------------------


def _form(title: str, name: str, value: str, same: Mapping[str, str]) -> Markup:
    hidden = [tag("input", type="hidden", name=key, value=kept) for key, kept in same.items()]
    field = tag("label", title, tag("input", name=name, value=value, autocomplete="off", spellcheck="false"))
    return tag("form", *hidden, field, tag("button", "Show"), method="get")


def _looked_up(view: JobView, config: StoreConfig, given: Parameters, same: Mapping[str, str]) -> Child:
    place = same["task"], same["store"], same["checkpoint"]
    if given.get("key"):
        key = _key(given["key"], config)
        value = view.get(*place, key)
        if value is None:
            hexadecimal = config.key_serde == "bytes" and given["key"].startswith("0x")
            more = " Digits after 0x are read as hexadecimal, also those of text." if hexadecimal else ""
            return tag("p", f"The store has no key {given['key']}.{more}", role="status")
        return _items(config, Found(((key, value),), None), same)
    if "prefix" in given or "after" in given:
        prefix = _key(given["prefix"], config) if given.get("prefix") else None
        start, end = prefix, after_prefix(prefix) if prefix else None
        if "after" in given:
            try:
                start = bytes.fromhex(given["after"])
            except ValueError:
                raise InvalidError("this is not the beginning of a page", hint="follow the link to it") from None
        return _items(config, view.scan(*place, start, end), {**same, "prefix": given.get("prefix", "")})
    return tag("p", "A look-up restores the store into a temporary directory on this machine.", class_="soft")


def _key(given: str, config: StoreConfig) -> bytes:
    try:
        return parse(given, config.key_serde)
    except InvalidError as error:
        raise InvalidError(error.message, hint="write the key as the store's serde reads it") from None


def _items(config: StoreConfig, found: Found, same: Mapping[str, str]) -> Child:
    serde = value_serde_of(replace(config), None)  # the file of its schemas may have changed while the page is open
    rows = [
        (tag("code", _shown(key, config.key_serde)), tag("code", _shown(value, serde))) for key, value in found.items
    ]
    shown = table("Keys and values, in key order", ("key", "value"), rows, "The store has no such keys.")
    if found.following is None:
        return shown
    link = "?" + urlencode({**same, "after": found.following.hex()})
    return [shown, tag("nav", tag("a", "Next keys", href=link), aria_label="Pages")]


def _shown(data: bytes, serde: object) -> str:
    try:
        whole = text(render(data, serde))  # type: ignore[arg-type]
    except InvalidError:
        whole = text(render(data, "bytes"))
    return whole if len(whole) <= _SHOWN else f"{whole[:_SHOWN]}… ({len(data):,} bytes)"


# --- blobs -------------------------------------------------------------------------------------------------------


def _run_button(kind: str, title: str, run: Run | None) -> Child:
    if run is not None and run.ended_ms is None:
        return None
    hidden = tag("input", type="hidden", name="kind", value=kind)
    return tag("form", hidden, tag("button", title), method="post", action="run")


def _run_state(view: JobView, run: Run | None) -> Child:
    if run is None:
        return tag("p", "Not run yet. It asks the blob store about every blob, which takes a while for a large job.")
    if run.ended_ms is None:
        return tag("p", f"Running for {seconds((view.now_ms - run.started_ms) / 1000)}: {run.progress}", role="status")
    took = f"Finished at {moment(run.ended_ms)} after {seconds((run.ended_ms - run.started_ms) / 1000)}."
    if run.error is None:
        return tag("p", took)
    hide = view.config.hider()
    return [tag("p", took), alert([hide(run.error.message)]), run.error.hint and tag("p", prose(hide(run.error.hint)))]


def _bytes(found: object) -> Child:
    assert isinstance(found, BlobBytes)
    counts = found.report.counts
    kept = counts[BlobStatus.KEPT].size
    live = min(found.live, kept)
    rows = [
        ("live", live, "needed by a current checkpoint"),
        ("retained", kept - live, "needed by an older checkpoint, or in a shared blob"),
        ("young", counts[BlobStatus.YOUNG].size, "not needed, but younger than the grace period"),
        ("orphaned", counts[BlobStatus.ORPHAN].size, "not needed, and old: `statemgr gc --write` deletes it"),
        ("unknown", counts[BlobStatus.UNKNOWN].size, "of tasks without a known checkpoint"),
        ("foreign", counts[BlobStatus.FOREIGN].size, "with names that statemgr does not use"),
    ]
    lost = [f"missing: {blob_id}" for blob_id in found.report.missing[:_CHARTED]]
    expiring = [f"needed, but would expire: {blob_id}" for blob_id in found.report.expiring[:_CHARTED]]
    return [
        alert([*lost, *expiring]),
        bars("Bytes by kind", [(name, number, size(number)) for name, number, _ in rows]),
        table(
            "Bytes by kind",
            ("kind", "size", "bytes", "meaning"),
            [(a, size(b), f"{b:,}", prose(c)) for a, b, c in rows],
            "",
        ),
    ]


def _verified(found: object) -> Child:
    assert isinstance(found, Verified)
    kinds = (("lost", found.lost), ("damaged", found.damaged), ("expiring", found.expiring))
    bad = [(kind, one) for kind, several in kinds for one in several]
    rows = [(kind, one.task, one.store, one.checkpoint_ids, one.blob_id, one.problem) for kind, one in bad[:_TASKS]]
    checked = f"Checked {found.blobs:,} blobs ({size(found.size)}) of {found.checkpoints:,} checkpoints."
    headers = ("", "task", "store", "checkpoint", "blob", "problem")
    read = f"All bytes of {found.read:,} blobs were read." if found.read else "Their bytes were not read."
    whole = f"All blobs exist, with their sizes and without a TTL. {read}"
    return [tag("p", checked), table("What is wrong", headers, rows, whole)]


def _lag(lag: int | None) -> str:
    return "?" if lag is None else f"{lag:,}"


def _age(age_s: float | None) -> str:
    return "no checkpoint" if age_s is None else seconds(age_s)


def _number(given: Parameters, name: str, default: int, most: int) -> int:
    value = given.get(name, "")
    return min(int(value), most) if value.isascii() and value.isdecimal() and len(value) < 10 else default
