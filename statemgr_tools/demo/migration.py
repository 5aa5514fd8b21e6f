"""``statemgr demo --migrate``: a running job moves from changelogs to blobs and back, step by step:

1. start the servers; send the input's rows to a topic, slowly, until the walk is over
2. start the job in stage 1; then, for each step 1 → 2 → 3 → 4 → 3 → 2 → 1: look at the job (``migrate status``,
   ``plan``, ``verify``), change its configuration (``migrate advance`` or ``rollback``), kill it with SIGKILL, delete
   its local state, and start it in the new stage
3. in stage 4, also kill it, change the number of its tasks (``rescale``), and start it again
4. run it to the end of the input, recount the input, compare state and output with the recount, and draw the walk
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import Progress

from statemgr import JobConfig
from statemgr.errors import StatemgrError
from statemgr_tools.demo import verify
from statemgr_tools.demo.child import failure, kill_session, reports_in, run_child, start_child
from statemgr_tools.demo.dataset import Dataset
from statemgr_tools.demo.flow import dataset_of, local_servers, progress_on, spec_of
from statemgr_tools.demo.pipeline import Spec
from statemgr_tools.demo.producing import produce
from statemgr_tools.demo.recount import recount
from statemgr_tools.demo.settings import PARTITIONS, Run, Settings, own_directory, write_config
from statemgr_tools.demo.summary import Command, MigrationSummary
from statemgr_tools.demo.timeline import Timeline, save
from statemgr_tools.dev import find_java
from statemgr_tools.dev.signals import exit_on_signals

#: The rows are sent evenly over this time. If the walk takes longer, they are sent more and more slowly, because they
#: must not end before it. The remaining rows are sent at its end.
_WALK_S, _SLOWER_S = 240.0, 60.0
_TASKS_AFTER_RESCALE = 6
#: The kill comes up to this many seconds after the commands of its stage, in any phase of a batch.
_KILL_WITHIN_S = 1.5
_BATCH_DEADLINE_S = 180.0
#: Seconds for which a command waits for the job, and those after which a command counts as hung.
_WAIT_S, _COMMAND_DEADLINE_S = 300, 420.0


def migrate(settings: Settings, environment: Mapping[str, str], console: Console) -> MigrationSummary:
    """Run the demo of a migration, with progress on ``console``.

    Raises: StatemgrError, also if a command has another exit status than it must have; SystemExit on SIGTERM and
        SIGHUP.
    """
    began = time.monotonic()
    find_java()
    dataset = dataset_of(settings)
    run = Run(own_directory(settings.directory.absolute() / "demo"), secrets.token_hex(4))
    with (
        exit_on_signals(),
        progress_on(console) as progress,
        local_servers(run, settings, environment, progress) as running,
    ):
        assert running.bootstrap_servers is not None
        progress.console.print(f"seed {settings.seed}, files in {run.root}", markup=False, highlight=False)
        write_config(run, settings, running, ("kafka-changelog",), ("kafka-changelog",))
        spec = spec_of(run, settings, running.bootstrap_servers, rows_per_batch=50_000)
        input_ = Input(dataset, spec, sum(1 for _ in dataset.rows()), progress)
        timeline = Timeline(run.config, lambda: input_.sent)
        walk = Walk(run, spec, random.Random(settings.seed), timeline, progress)
        try:
            input_.start()
            timeline.start()
            walk.walk()
            rows = input_.send_rest()
            walk.finish()
        finally:
            walk.end()
            timeline.stop()
        truth = verify.recounted(recount(dataset, settings.sums))
        state = verify.state(JobConfig.from_file(run.config), "kafka-changelog", run.scratch / "verify")
        sides = [truth, state, *verify.output(run.output)]
        save(timeline, run.root / "migration.svg")
    return MigrationSummary(
        seed=settings.seed,
        directory=str(run.root),
        word="flights" if settings.input is None else "rows",
        measures=settings.sums,
        rows=rows,
        commands=walk.commands,
        kills=walk.kills,
        timeline=timeline,
        sides=sides,
        seconds=time.monotonic() - began,
    )


class Input:
    """Sends the rows in a thread, evenly over the walk. ``sent`` rows are on the topic or will be very soon."""

    def __init__(self, dataset: Dataset, spec: Spec, rows: int, progress: Progress) -> None:
        self.sent = 0
        self._arguments = (dataset, spec.bootstrap_servers, spec.topic, PARTITIONS)
        self._rows, self._every = rows, max(1, rows // 1000)
        self._progress, self._bar = progress, progress.add_task("rows to Kafka", total=rows)
        self._began = time.monotonic()
        self._hurry = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._send, name="input", daemon=True)

    def start(self) -> None:
        """Create the topic and start to send."""
        self._thread.start()

    def send_rest(self) -> int:
        """Send the rest immediately. Returns: the number of rows. Raises: the producer's error."""
        self._hurry.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self.sent

    def _send(self) -> None:
        try:
            self.sent = produce(*self._arguments, self._report, self._every)
        except BaseException as error:
            self._failure = error

    def _report(self, sent: int) -> None:
        self.sent = sent
        self._progress.update(self._bar, completed=sent)
        time_left = max(self._began + _WALK_S - time.monotonic(), _SLOWER_S)
        self._hurry.wait(time_left * self._every / max(self._rows - sent, self._every))


@dataclass
class Walk:
    """The job's process, and the commands that move it."""

    run: Run
    spec: Spec
    chance: random.Random
    timeline: Timeline
    progress: Progress
    commands: list[Command] = field(default_factory=list)
    kills: int = 0
    _child: subprocess.Popen[bytes] | None = None

    def walk(self) -> None:
        """Go through all stages, forward and back. At the end, the job runs in the first stage."""
        self._start()
        self._look(both=False)
        for target in (2, 3, 4):
            self._command("migrate", "plan")
            self._command("migrate", "advance", "--write")
            self._restart()
            self._command("migrate", "advance", "--wait", "--timeout", str(_WAIT_S))
            self._look(both=target < 4)
        self._rescale()
        self._kill()
        self._command("migrate", "rollback", "--write")  # writes the changelogs but stops nothing, so the job is down
        self._start()
        self._command("migrate", "rollback", "--wait", "--timeout", str(_WAIT_S))
        self._look(both=True)
        for target in (2, 1):
            self._command("migrate", "rollback", "--write")
            self._restart()
            self._command("migrate", "rollback", "--wait", "--timeout", str(_WAIT_S))
            self._look(both=target > 1)

    def finish(self) -> None:
        """Kill the job once more, then run it over all rows on the topic."""
        self._kill()
        outcome = run_child(self._spec(endless=False), self.run.root, self.run.log, lambda _: None, _BATCH_DEADLINE_S)
        assert outcome.hit is None

    def end(self) -> None:
        """End the job's processes, if they still run."""
        if self._child is not None:
            kill_session(self._child)
            self._child = None

    # --- steps ------------------------------------------------------------------------------------------

    def _look(self, *, both: bool) -> None:
        self._await_batches(2)
        self._command("migrate", "status")
        self._command("migrate", "verify") if both else self._command("snapshots", "verify")

    def _rescale(self) -> None:
        self._kill()
        self._command("rescale", "--tasks", str(_TASKS_AFTER_RESCALE), "--write")
        self.timeline.mark("rescaled")
        self._start()
        self._look(both=False)

    def _restart(self) -> None:
        self._kill()
        self._start()

    def _start(self) -> None:
        self._child = start_child(self._spec(endless=True), self.run.root, self.run.log)

    def _kill(self) -> None:
        """Kill all processes of the job, and delete its local state as if the machine were lost."""
        assert self._child is not None
        time.sleep(self.chance.uniform(0.0, _KILL_WITHIN_S))
        self._check_alive()
        processes = kill_session(self._child)
        self._child, self.kills = None, self.kills + 1
        self.timeline.mark("killed")
        shutil.rmtree(self.run.state, ignore_errors=True)
        self.progress.console.print(f"[red]SIGKILL[/] {processes} processes, local state deleted", highlight=False)

    def _spec(self, *, endless: bool) -> Spec:
        return replace(self.spec, endless=endless)

    def _await_batches(self, count: int) -> None:
        deadline = time.monotonic() + _BATCH_DEADLINE_S
        while sum(not report["replayed"] for report in reports_in(self.run.events)) < count:
            self._check_alive()
            if time.monotonic() > deadline:
                raise StatemgrError(f"no batch in {_BATCH_DEADLINE_S:.0f} s", hint=f"see {self.run.log}")
            time.sleep(0.1)

    def _check_alive(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            raise failure(self.run.log)

    def _command(self, *arguments: str) -> None:
        """Run a command as an operator does. Raises: StatemgrError if its exit status is not 0."""
        began, text = time.monotonic(), f"statemgr {' '.join(arguments)}"
        try:
            done = subprocess.run(
                [sys.executable, "-m", "statemgr", *arguments, "--config", str(self.run.config)],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_COMMAND_DEADLINE_S,
                env={**os.environ, "COLUMNS": "140"},
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise StatemgrError(
                f"`{text}` has not ended within {_COMMAND_DEADLINE_S:.0f} s", hint=f"see {self.run.log}"
            ) from error
        with self.run.log.open("a") as log:
            log.write(f"$ {text}\n{done.stdout}{done.stderr}")
        self._check_alive()
        if done.returncode != 0:
            what = (done.stderr or done.stdout).strip()[-2000:]
            raise StatemgrError(
                f"`{text}` ended with exit status {done.returncode}: {what}", hint=f"see {self.run.log}"
            )
        seconds = time.monotonic() - began
        self.commands.append(Command(text, seconds))
        self.progress.console.print(f"$ {text}  [dim]{seconds:.1f} s[/]", highlight=False)
