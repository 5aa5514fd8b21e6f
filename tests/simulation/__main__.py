"""``python -m tests.simulation``: lives histories, and tells the story of one that went wrong.

``make simulate`` calls this. Each seed is a history. A seed that fails is made shorter
(:mod:`tests.simulation.shrink`), and its story is printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.history import History

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Returns: the exit status, 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:500", metavar="FIRST:END", help="seeds to try (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=inf, help="end after so many (default: when all are lived)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="tell the story of one seed")
    parser.add_argument("--fault", metavar="NAME", help="with a known fault put back (tests/simulation/known_faults)")
    parser.add_argument("--hunt", action="store_true", help="look for seeds of all known faults, and write them down")
    parser.add_argument("--first", action="store_true", help="stop at the first seed that fails")
    parser.add_argument("--histories", help=argparse.SUPPRESS)
    given = parser.parse_args()
    first, _, end = given.seeds.partition(":")
    if given.histories is not None:
        _work(json.loads(given.histories))
        return 0
    if given.replay is not None:
        return _tell(given.replay, given.fault)
    seeds = range(int(first), int(end))
    if given.hunt:
        return _hunt(seeds, given.jobs)
    return live_all(seeds, given.jobs, given.fault, within_s=60 * given.minutes, only_first=given.first)


def _environment() -> dict[str, str]:
    # a set of texts has the same order in every run
    return {**os.environ, "PYTHONHASHSEED": "0"}


def _with(fault: str | None) -> list[str]:
    return ["--fault", fault] if fault else []


def lived(histories: Sequence[tuple[int, str | None]], jobs: int, within_s: float = inf) -> Iterator[dict[str, object]]:
    """Live histories in ``jobs`` processes, in any order.

    Args:
        histories: seeds, each with the name of the known fault that is put back, if there is one.
        within_s: after so many seconds, those that are not done are left out.

    Returns: an object for each, with ``seed``, ``fault``, ``fingerprint``, ``seen`` and ``error`` (None if it went
        well).
    """
    end_s = time.monotonic() + within_s
    read, write = os.pipe()
    command = [sys.executable, "-m", "tests.simulation", "--histories"]
    workers = [
        subprocess.Popen([*command, json.dumps(histories[number::jobs])], cwd=ROOT, env=_environment(), stdout=write)
        for number in range(min(jobs, len(histories)))
    ]
    os.close(write)
    with open(read) as results:  # one pipe for all, so that none waits until another is done
        try:
            for line in results:
                yield json.loads(line)
                if time.monotonic() >= end_s:
                    return
            if any(worker.wait() for worker in workers):
                raise RuntimeError("a process that lives histories failed")
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _live(history: History, fault: str | None) -> BaseException | None:
    """Live a history with a known fault put back, or without one. Returns: the error with which it ended."""
    from tests.simulation.known_faults import put_back

    try:
        with put_back(fault):
            history.run()
    except BaseException as error:
        return error
    return None


def _work(histories: Sequence[tuple[int, str | None]]) -> None:
    """Live histories one after the other, and write one line of JSON for each, short enough to stay whole in a pipe."""
    from tests.simulation.history import History

    gc.disable()  # finalizers must run at the same moment in each run
    for seed, fault in histories:
        gc.collect()
        gc.freeze()  # what is here between two histories stays, such as modules: do not look at it again
        history = History(seed)
        error = _live(history, fault)
        result = {
            "seed": seed, "fault": fault, "fingerprint": history.scheduler.fingerprint(), "seen": history.seen,
            "error": None if error is None else _told(error)[:2000],
        }  # fmt: skip
        os.write(1, json.dumps(result).encode() + b"\n")  # other processes write to this pipe, too
        del history, error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def live_all(
    seeds: range, jobs: int, fault: str | None = None, *, within_s: float = inf, only_first: bool = False
) -> int:
    """Live histories, and tell the story of the first one that fails. Returns: the exit status."""
    began_s, done, failed, seen = time.monotonic(), 0, [], Counter[str]()
    for result in lived([(seed, fault) for seed in seeds], jobs, within_s):
        done += 1
        seen.update(result["seen"])  # type: ignore[call-overload]
        if result["error"] is not None:
            failed.append(result)
            print(f"seed {result['seed']}: {result['error']}", flush=True)
            if only_first:
                break
        elif sys.stderr.isatty():
            print(f"\r{done} of {len(seeds)} histories", end="", file=sys.stderr, flush=True)
    happened = ", ".join(f"{number:,} × {kind}" for kind, number in sorted(seen.items()))
    print(f"{done:,} histories in {time.monotonic() - began_s:.0f} s, {len(failed)} failed: {happened}")
    if failed:
        worst = min(int(str(result["seed"])) for result in failed)
        replay = [sys.executable, "-m", "tests.simulation", "--replay", str(worst), *_with(fault)]
        subprocess.run(replay, cwd=ROOT, env=_environment(), check=False)
    return 1 if failed else 0


def _hunt(seeds: range, jobs: int) -> int:
    from tests.simulation.hunt import hunt, write

    write(hunt(seeds, lambda histories: lived(histories, jobs)))
    return 0


def _tell(seed: int, fault: str | None) -> int:
    """Tell the story of a seed with as few owners, kinds of faults and events as it needs to fail."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], _environment())
    from tests.simulation.shrink import shortest

    def lived_again(history: History) -> BaseException | None:
        gc.collect()
        return _live(history, fault)

    gc.disable()
    history, error = shortest(seed, lived_again)
    for at_s, who, text in history.scheduler.story:
        print(f"{at_s:12.3f} s  {who:24} {text}")
    print(f"seed {seed}: {'all is well' if error is None else _told(error)}")
    return 0 if error is None else 1


if __name__ == "__main__":
    sys.exit(main())
