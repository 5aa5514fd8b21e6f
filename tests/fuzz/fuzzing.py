"""Runs a target on mutated inputs, with limits for memory and time: ``python -m tests.fuzz.fuzzing '{…}'``.

If atheris is installed (``pip install atheris``), it makes the inputs. Otherwise :class:`Mutator` does: it keeps inputs
that reach new lines of statemgr. Either begins with the seeds of the target and with a corpus, and adds to the corpus.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

#: Memory of a target above what it has at the beginning.
MEMORY_MIB = 512
_INTERESTING = (b"\x00", b"\xff", b"\x7f", b"\x80\x80\x80\x80\x01", b"\xff" * 8, b"-1", b"1e999", b"${", b"\n", b"../")


class TooSlow(AssertionError):
    """An input took too long."""


def limited(seconds: float) -> Any:
    """Limit memory from now on. Returns: a function that limits the time of what follows it, until the next call."""
    most = psutil.Process().memory_info().vms + MEMORY_MIB * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def late(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"an input took more than {seconds:g} s")

    signal.signal(signal.SIGALRM, late)
    return lambda: signal.setitimer(signal.ITIMER_REAL, seconds)


class Mutator:
    """Makes inputs from others, and keeps those that reach new lines."""

    def __init__(self, corpus: list[bytes], chance: random.Random, root: Path) -> None:
        self.corpus = corpus or [b""]
        self._chance, self._root = chance, str(root)
        self._lines: set[tuple[str, int]] = set()

    def mutated(self) -> bytes:
        """Return another input."""
        chance = self._chance
        data = bytearray(chance.choice(self.corpus))
        for _ in range(chance.choice((1, 1, 2, 4, 16))):
            at = chance.randrange(len(data) + 1)
            kind = chance.randrange(6)
            if kind == 0 and data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
            elif kind == 1:
                data[at:at] = chance.choice(_INTERESTING)
            elif kind == 2:
                del data[at : at + chance.randrange(1, 9)]
            elif kind == 3:
                data[at:at] = data[: chance.randrange(len(data) + 1)][-64:]
            elif kind == 4:
                other = chance.choice(self.corpus)
                data[at:] = other[chance.randrange(len(other) + 1) :]
            elif data:
                data[at % len(data)] = chance.randrange(256)
        return bytes(data[:65536])

    def traced(self, run: Any, data: bytes) -> bool:
        """Run an input. Returns: whether it has reached a new line."""
        before = len(self._lines)

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if not frame.f_code.co_filename.startswith(self._root):
                return None
            self._lines.add((frame.f_code.co_filename, frame.f_lineno))
            return trace

        sys.settrace(trace)
        try:
            run(data)
        finally:
            sys.settrace(None)
        return len(self._lines) > before


def save(directory: Path, data: bytes) -> Path:
    """Keep an input under a name that follows from it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    return path


def main() -> int:
    """Fuzz targets, one after the other: ``{"targets": […], "seconds": … (each), "seed": …, "corpus": directory}``."""
    order = json.loads(sys.argv[1])
    if order.get("guided"):
        [name] = order["targets"]
        return _guided(order, name)
    return max(_lines(order, name) for name in order["targets"])


def _places(order: dict[str, Any], name: str) -> tuple[Path, Path]:
    """The corpus of a target, and where inputs are kept that show a fault."""
    directory, file_name = Path(order["corpus"]), name.replace(" ", "-").replace("'", "")
    (directory / file_name).mkdir(parents=True, exist_ok=True)
    return directory / file_name, directory / "found" / file_name


def _lines(order: dict[str, Any], name: str) -> int:
    from tests.fuzz.targets import TARGETS

    corpus, found = _places(order, name)
    target = TARGETS[name]
    inputs = [*target.seeds, *(path.read_bytes() for path in sorted(corpus.iterdir()) if path.is_file())]
    for data in target.seeds:
        target(data)  # imports what it needs
    begin = limited(target.each_s)
    mutator = Mutator(list(inputs), random.Random(order["seed"]), Path(__file__).resolve().parents[2] / "statemgr")
    ends, count = time.monotonic() + order["seconds"], 0
    while time.monotonic() < ends:
        data = inputs.pop() if inputs else mutator.mutated()
        count += 1
        begin()
        try:
            if mutator.traced(target, data):
                mutator.corpus.append(data)
                save(corpus, data)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(f"{name}: {type(error).__name__}: {error} [{save(found, data)}]", flush=True)
            traceback.print_exc()
            return 1
        signal.setitimer(signal.ITIMER_REAL, 0)
    print(f"{name}: {count} inputs, {len(mutator._lines)} lines, {len(mutator.corpus)} kept", flush=True)
    return 0


def _guided(order: dict[str, Any], name: str) -> int:
    import atheris

    corpus, found = _places(order, name)
    with atheris.instrument_imports(include=["statemgr", "statemgr_tools"]):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    for data in target.seeds:
        save(corpus, data)
    found.mkdir(parents=True, exist_ok=True)
    arguments = [
        sys.argv[0],
        f"-max_total_time={int(order['seconds'])}",
        f"-seed={order['seed'] % (1 << 31) or 1}",
        f"-timeout={int(target.each_s) + 1}",
        f"-rss_limit_mb={MEMORY_MIB * 2}",
        "-max_len=65536",
        f"-artifact_prefix={found}/",
        "-print_final_stats=1",
        str(corpus),
    ]
    atheris.Setup(arguments, target, enable_python_coverage=True)
    # it ends the process with exit() of C, in which the libraries of servers' clients wait for their threads
    leave = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: os._exit(0))
    ctypes.CDLL(None)["__cxa_atexit"](leave, None, None)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    sys.exit(main())
