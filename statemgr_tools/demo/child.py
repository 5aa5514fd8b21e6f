"""Runs the pipeline's process in its own session, so that a kill can be as sudden as a power cut.

Kills process groups with SIGKILL. Finds the processes by their session, never by name.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from statemgr.errors import StatemgrError
from statemgr_tools.demo.pipeline import Spec

_POLL_S = 0.05
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception): \S")
_KILL_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Outcome:
    """The end of a run: the phase in which it was killed (None if it was not), and the subject of that phase."""

    hit: str | None
    subject: str
    processes: int
    seconds: float


def run_child(
    spec: Spec, directory: Path, log: Path, batches: Callable[[list[dict[str, Any]]], None], deadline_s: float
) -> Outcome:
    """Run the pipeline until it ends, or until it reaches the aimed phase and is killed.

    Args:
        batches: called with all batch reports of the run whenever there are new ones.

    Raises: StatemgrError if it failed, or did not end by the deadline.
    """
    hit_file = Path(spec.bait[2]) if spec.bait else None
    events = Path(spec.events)
    began = time.monotonic()
    child = start_child(spec, directory, log)
    seen = 0
    try:
        while child.poll() is None:
            reports = reports_in(events)
            if len(reports) > seen:
                seen = len(reports)
                batches(reports)
            if hit_file is not None and hit_file.exists():
                hit = json.loads(hit_file.read_text())
                killed = kill_session(child)
                return Outcome(hit["phase"], hit["subject"], killed, time.monotonic() - began)
            if time.monotonic() - began > deadline_s:
                raise StatemgrError(f"the pipeline did not end in {deadline_s:.0f} s", hint=f"see {log}")
            try:
                child.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
        batches(reports_in(events))
        if child.returncode != 0:
            raise failure(log)
        return Outcome(None, "", 0, time.monotonic() - began)
    finally:
        kill_session(child)


def start_child(spec: Spec, directory: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the pipeline, with no batch reported yet. The caller ends it with :func:`kill_session`."""
    path = directory / "spec.json"
    spec.save(path)
    Path(spec.events).write_text("")
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "statemgr_tools.demo.pipeline", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill_session(child: subprocess.Popen[bytes]) -> int:
    """SIGKILL every process of the child's session: driver, JVM, Python workers. Returns: their number."""
    killed: set[int] = set()
    end = time.monotonic() + _KILL_DEADLINE_S
    while time.monotonic() < end:
        members = _session_members(child.pid)
        if not members:
            break
        killed.update(members)
        for group in set(members.values()):
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        child.poll()
    child.wait(_KILL_DEADLINE_S)
    return len(killed)


def _session_members(session: int) -> dict[int, int]:
    members = {}
    for process in psutil.process_iter(["pid", "status"]):
        pid = process.info["pid"]
        if process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        try:
            if os.getsid(pid) == session:
                members[pid] = os.getpgid(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return members


def failure(log: Path) -> StatemgrError:
    """Return the error of a pipeline that ended with its own error."""
    return StatemgrError(f"the pipeline failed: {_last_error(log)}", hint=f"see {log}")


def reports_in(events: Path) -> list[dict[str, Any]]:
    """Return the batch reports of the running pipeline."""
    reports = []
    for line in events.read_text().splitlines():
        try:
            reports.append(json.loads(line))
        except ValueError:
            break  # the pipeline is writing it now
    return reports


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    typed = [line.removeprefix("statemgr: ") for line in lines if line.startswith("statemgr: ")]
    others = [line for line in lines if _EXCEPTION.match(line)]
    return (typed or others or lines or ["its log is empty"])[-1][:500]
