"""The demo, step by step:

1. start a Kafka broker (and an S3 server), unless the environment names running ones
2. send the input's rows to a topic
3. run the pipeline; kill it in a phase that the seed chooses; delete its local state; start it again, restoring from
   the blob store and from the changelogs in turn, until it has run to the end
4. recount the input, read the state from each backend and the output, compare them
5. make a large state, open it before it is here, read a value, and fetch the rest
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from statemgr import JobConfig
from statemgr_tools.demo import verify
from statemgr_tools.demo.bait import draw
from statemgr_tools.demo.child import run_child
from statemgr_tools.demo.dataset import Dataset, flights
from statemgr_tools.demo.first_answer import FirstAnswer, first_answer
from statemgr_tools.demo.measures import measures_of
from statemgr_tools.demo.pipeline import Spec
from statemgr_tools.demo.producing import forget_older_runs, produce
from statemgr_tools.demo.recount import recount
from statemgr_tools.demo.settings import FACTORIES, PARTITIONS, Run, Settings, own_directory, write_config
from statemgr_tools.demo.summary import Start, Summary
from statemgr_tools.dev import DevServers, connector_jars, find_java, servers
from statemgr_tools.dev.signals import exit_on_signals

_RESTORE_ORDER = ("blob-store", "kafka-changelog")
_BATCHES_PER_START = 5
_START_DEADLINE_S = 600.0


def demo(settings: Settings, environment: Mapping[str, str], console: Console) -> Summary:
    """Run the demo, with progress on ``console``. Raises: StatemgrError; SystemExit on SIGTERM and SIGHUP.

    However it ends, the servers that it started and the pipeline's processes end with it.
    """
    began = time.monotonic()
    find_java()
    dataset = dataset_of(settings)
    run = Run(own_directory(settings.directory.absolute() / "demo"), secrets.token_hex(4))
    with exit_on_signals(), progress_on(console) as progress:
        progress.console.print(
            f"seed {settings.seed}, files in {run.root}", markup=False, highlight=False, soft_wrap=True
        )
        with local_servers(run, settings, environment, progress) as running:
            rows, starts = _work(settings, run, dataset, running, progress)
            config = write_config(run, settings, running, _RESTORE_ORDER)
            sides = _compare(settings, run, dataset, config, progress)
            answer = _first_answer(settings, run, config, progress)
            listing = _list_checkpoints(run)
    return Summary(
        seed=settings.seed,
        blob=settings.blob,
        directory=str(run.root),
        word="flights" if settings.input is None else "rows",
        measures=settings.sums,
        rows=rows,
        starts=starts,
        sides=sides,
        listing=listing,
        seconds=time.monotonic() - began,
        first_answer=answer,
    )


def dataset_of(settings: Settings) -> Dataset:
    """Return the input. Raises: InvalidError for a wrong file; PrerequisiteMissing without the flights."""
    columns, _ = measures_of(settings.sums)
    found = flights(columns) if settings.input is None else Dataset(settings.input, settings.key, tuple(columns))
    next(found.rows(), None)  # a wrong file is an error before anything starts
    return found


def spec_of(run: Run, settings: Settings, bootstrap_servers: str, rows_per_batch: int) -> Spec:
    """Return the arguments of the pipeline's process."""
    return Spec(
        config=str(run.config),
        location=f"file://{run.root}/checkpoint-location",  # Spark takes it literally, so no %20 for a space
        output=str(run.output),
        events=str(run.events),
        scratch=str(run.scratch),
        bootstrap_servers=bootstrap_servers,
        topic=run.topic,
        sums=settings.sums,
        rows_per_batch=rows_per_batch,
    )


@contextlib.contextmanager
def local_servers(
    run: Run, settings: Settings, environment: Mapping[str, str], progress: Progress
) -> Iterator[DevServers]:
    """Yield the servers' addresses and the run's scratch directory.

    The context manager starts the servers that no environment variable names, and stops the ones that it started.
    """
    before = servers.running(settings.directory / "dev")
    try:
        run.scratch.mkdir()
        yield _servers(settings, environment, progress)
    finally:
        servers.down(settings.directory / "dev", keep=before)
        shutil.rmtree(run.scratch, ignore_errors=True)


def _work(
    settings: Settings, run: Run, dataset: Dataset, running: DevServers, progress: Progress
) -> tuple[int, list[Start]]:
    assert running.bootstrap_servers is not None
    bar = progress.add_task("rows to Kafka", total=None)
    rows = produce(
        dataset, running.bootstrap_servers, run.topic, PARTITIONS, lambda done: progress.update(bar, completed=done)
    )
    progress.update(bar, total=rows, completed=rows)
    rows_per_batch = max(1, -(-rows // (_BATCHES_PER_START * (settings.kills + 1))))
    spec = spec_of(run, settings, running.bootstrap_servers, rows_per_batch)
    bar = progress.add_task("pipeline", total=rows)
    starts: list[Start] = []
    for number, (phase, batch) in enumerate([*draw(settings.seed, settings.kills, settings.aims), ("", 0)]):
        restore = _RESTORE_ORDER[(number - 1) % 2] if number else None
        if number:
            # as if the machine and its disk were lost
            shutil.rmtree(run.state, ignore_errors=True)
        write_config(run, settings, running, [restore] if restore else _RESTORE_ORDER)
        bait = (phase, batch, str(run.root / f"hit-{number}.json")) if phase else None
        label = f"start {number + 1}" + (f", restoring from {restore}" if restore else "")
        progress.update(bar, description=f"pipeline, {label}")
        start = _start(replace(spec, bait=bait), run, restore, lambda done: progress.update(bar, completed=done))
        start.aimed = phase or None
        starts.append(start)
        if start.outcome.hit is None:
            break
        progress.console.print(
            f"killed in [bold]{start.outcome.hit}[/] of {start.outcome.subject} "
            f"(aimed at {phase}), {start.outcome.processes} processes",
            highlight=False,
        )
    progress.update(bar, description="pipeline", completed=rows)
    return rows, starts


def _start(spec: Spec, run: Run, restore: str | None, progress: Callable[[int], None]) -> Start:
    reports: list[dict[str, Any]] = []

    def follow(found: list[dict[str, Any]]) -> None:
        reports[:] = found
        if found:
            progress(sum(found[-1]["input_offsets"].values()))

    outcome = run_child(spec, run.root, run.log, follow, _START_DEADLINE_S)
    return Start(restore, outcome, reports)


def _compare(
    settings: Settings, run: Run, dataset: Dataset, config: JobConfig, progress: Progress
) -> list[verify.Side]:
    """Return the recount first, then the sides that must equal it."""
    bar = progress.add_task("recount and compare", total=2 + len(FACTORIES))
    sides = [verify.recounted(recount(dataset, settings.sums))]
    progress.advance(bar)
    for factory in FACTORIES:
        sides.append(verify.state(config, factory, run.scratch / "verify"))
        progress.advance(bar)
    sides.extend(verify.output(run.output))
    progress.advance(bar)
    return sides


def _first_answer(settings: Settings, run: Run, config: JobConfig, progress: Progress) -> FirstAnswer:
    bar = progress.add_task("a large state", total=1)
    found = first_answer(
        config, run.scratch / "first-answer", settings.seed, lambda step: progress.update(bar, description=step)
    )
    progress.update(bar, completed=1)
    return found


def _list_checkpoints(run: Run) -> str:
    command = [sys.executable, "-m", "statemgr", "checkpoints", "list", "--config", str(run.config)]
    try:
        listing = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "COLUMNS": "140"}
        )
    except subprocess.TimeoutExpired as error:
        return f"`statemgr checkpoints list` has not ended within {error.timeout:.0f} s"
    return listing.stdout if listing.returncode == 0 else f"{listing.stdout}{listing.stderr}"


def _servers(settings: Settings, environment: Mapping[str, str], progress: Progress) -> DevServers:
    """Return the servers' addresses. Start the servers that no environment variable names."""
    kafka, s3 = environment.get("STATEMGR_TEST_KAFKA"), environment.get("STATEMGR_TEST_S3_ENDPOINT")
    directory = settings.directory / "dev"
    need_s3 = settings.blob == "s3" and s3 is None
    bar = progress.add_task("servers", total=1)
    running = servers.up(
        directory,
        kafka=kafka is None,
        s3=need_s3,
        gcs=settings.blob == "gcs",
        azure=settings.blob == "azure",
        report=lambda step: progress.update(bar, description=step),
    )
    progress.update(bar, description="fetching Spark's Kafka connector (the first time)")
    connector_jars()  # not in the child, whose error would be long without a network
    progress.update(bar, description="servers", completed=1)
    if kafka is None and running.bootstrap_servers is not None:
        forget_older_runs(running.bootstrap_servers)
    if kafka is not None:
        running = replace(running, bootstrap_servers=kafka)
    if s3 is not None:
        running = replace(
            running,
            s3_endpoint=s3,
            s3_bucket=environment.get("STATEMGR_TEST_S3_BUCKET", "statemgr-test"),
            s3_region=environment.get("STATEMGR_TEST_S3_REGION", "us-east-1"),
            s3_access_key=environment.get("STATEMGR_TEST_S3_ACCESS_KEY"),
            s3_secret_key=environment.get("STATEMGR_TEST_S3_SECRET_KEY"),
        )
    return running


def progress_on(console: Console) -> Progress:
    """Show bars with a count and the time."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
