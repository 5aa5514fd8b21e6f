"""A server process that outlives the process that started it. It is found and stopped by PID and start time.

The start time shows whether the PID now belongs to another process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil

from statemgr.errors import UnavailableError

_START_TIME_TOLERANCE_S = 1.0
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """One server: its PID, the start of its process (seconds since the epoch) and its log file."""

    pid: int
    started_at: float
    log: Path

    def process(self) -> psutil.Process | None:
        """Return the running process, or None if it has ended (or its PID now belongs to another process)."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started_at) > _START_TIME_TOLERANCE_S:
                return None
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            return None
        return process

    @property
    def running(self) -> bool:
        """Whether the process still runs."""
        return self.process() is not None

    def stop(self, grace_s: float = 10.0) -> bool:
        """End the process with SIGTERM, and with SIGKILL after ``grace_s``. Return False if it was not running."""
        process = self.process()
        if process is None:
            return False
        try:
            process.terminate()
            process.wait(grace_s)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(grace_s)
        except psutil.NoSuchProcess:
            pass
        return True

    def kill(self) -> None:
        """End the process with SIGKILL and wait."""
        process = self.process()
        if process is not None:
            process.kill()
            process.wait(10.0)

    def suspend(self) -> None:
        """Stop all threads with SIGSTOP, like a long pause of the machine. Return when all of them have stopped."""
        process = self.process()
        if process is not None:
            process.suspend()
            while process.is_running() and not _stands_still(process):
                time.sleep(_POLL_S / 10)

    def resume(self) -> None:
        """Resume the process (SIGCONT)."""
        process = self.process()
        if process is not None:
            process.resume()


def _stands_still(process: psutil.Process) -> bool:
    """Return whether no thread runs any more: a signal reaches the threads one after the other."""
    if not psutil.LINUX:
        return process.status() == psutil.STATUS_STOPPED
    states = Path(f"/proc/{process.pid}/task").glob("*/stat")
    # the state follows the name, which is in parentheses and may contain any character
    return all(state.read_text().rpartition(")")[2].split()[0] in "TXZ" for state in states)


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> ServerProcess:
    """Start a command in its own session, and append its output to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as output:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            cwd=cwd,
            start_new_session=True,  # Ctrl-C in the terminal is for the caller, not for the server
        )
    try:
        started_at = psutil.Process(child.pid).create_time()
    except psutil.NoSuchProcess:
        started_at = 0.0
    # The server may outlive this process. Without a return code, Popen's finalizer would warn of that.
    child.returncode = 0
    return ServerProcess(pid=child.pid, started_at=started_at, log=log)


def wait_until_ready(server: ServerProcess, ready: Callable[[], bool], *, name: str, deadline_s: float) -> None:
    """Poll ``ready`` until it returns True.

    Raises:
        UnavailableError: the process ended, or the deadline passed; it quotes the log's last line.
    """
    end = time.monotonic() + deadline_s
    while True:
        if not server.running:
            raise _not_up(server, f"{name} ended while it was starting")
        if ready():
            return
        if time.monotonic() > end:
            raise _not_up(server, f"{name} was not ready after {deadline_s:.0f} s")
        time.sleep(_POLL_S)


def _not_up(server: ServerProcess, message: str) -> UnavailableError:
    lines = server.log.read_text(errors="replace").splitlines() if server.log.exists() else []
    errors = [line for line in lines if "ERROR" in line or "Exception" in line or "error" in line] or lines
    last = errors[-1].strip()[:300] if errors else "its log is empty"
    return UnavailableError(message, hint=f"see its log; it says: {last}", log=str(server.log))


def free_port() -> int:
    """Return a TCP port of the loopback interface on which no program listens now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return int(port)


def accepts_connections(port: int) -> bool:
    """Return whether a program listens on this port of the loopback interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def stays_taken(port: int, *, wait_s: float = 1.0) -> bool:
    """Return whether another program keeps this port. A server that has just died may hold it a moment longer."""
    end = time.monotonic() + wait_s
    while accepts_connections(port):
        if time.monotonic() > end:
            return True
        time.sleep(_POLL_S)
    return False


def listener(port: int) -> str | None:
    """Return the program that listens on this TCP port, as ``java (process 123)``; None if this user may not see it."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return None


@dataclass(kw_only=True)
class Server:
    """A server in ``directory``. A restart keeps its port and its other settings."""

    name: ClassVar[str]
    ready_deadline_s: ClassVar[float]
    grace_s: ClassVar[float]

    directory: Path
    port: int = field(default_factory=free_port)
    process: ServerProcess | None = None

    @property
    def running(self) -> bool:
        """Whether the server's process runs."""
        return self.process is not None and self.process.running

    def start(self, *, deadline_s: float | None = None, spawned: Callable[[], None] = lambda: None) -> None:
        """Start the server, and wait until it is ready. If it already runs, only wait.

        Args:
            spawned: called as soon as the process exists.

        Raises:
            PrerequisiteMissing: a required program is missing.
            UnavailableError: the server did not start (the error names its log), or a download failed.
        """
        deadline = self.ready_deadline_s if deadline_s is None else deadline_s
        if self.process is not None and self.process.running:
            self.wait(self.process, deadline)
            return
        self.process = self.spawn()
        try:
            spawned()
            self.wait(self.process, deadline)
        except BaseException:
            self.process.stop(1.0)
            raise

    def wait(self, process: ServerProcess, deadline_s: float) -> None:
        """Wait until the server answers."""
        wait_until_ready(process, self.answers, name=self.name, deadline_s=deadline_s)

    def stop(self, grace_s: float | None = None) -> None:
        """Stop the server cleanly, or with SIGKILL after ``grace_s`` seconds."""
        if self.process is not None:
            self.process.resume()
            self.process.stop(self.grace_s if grace_s is None else grace_s)

    def spawn(self) -> ServerProcess:
        """Start the process."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Return whether the server answers a request."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the directory, for JSON."""
        found = asdict(self)
        del found["directory"]
        return (
            found if self.process is None else {**found, "process": {**found["process"], "log": str(self.process.log)}}
        )

    @classmethod
    def from_dict(cls, directory: Path, found: Mapping[str, Any]) -> Self:
        """Return the server that :meth:`to_dict` described. Raises: KeyError, TypeError for another description."""
        process = found["process"] and ServerProcess(**{**found["process"], "log": Path(found["process"]["log"])})
        return cls(directory=directory, **{**found, "process": process})
