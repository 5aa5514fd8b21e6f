"""Fuzz every target: ``python -m tests.fuzz --minutes 10 [--target NAME] [--seed N] [--corpus DIRECTORY]``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def fuzz(targets: list[str], seconds: float, seed: int, corpus: Path, *, guided: bool = False) -> tuple[bool, str]:
    """Fuzz targets in a process of their own. Returns: whether nothing was found, and what the process says.

    Args:
        seconds: for each target.
        guided: by atheris, which takes one target.
    """
    order = {"targets": targets, "seconds": seconds, "seed": seed, "corpus": str(corpus), "guided": guided}
    run = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.fuzzing", json.dumps(order)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds * len(targets) + 300,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    said = run.stdout + (run.stderr[-3000:] if run.returncode else "")
    if guided and not run.returncode:
        numbers = [line.rpartition(" ")[2] for line in run.stderr.splitlines() if "number_of_executed_units" in line]
        said = f"{targets[0]}: {', '.join(numbers)} inputs"
    return run.returncode == 0, said.strip()


def main() -> int:
    """Fuzz all targets, two at a time, or one."""
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--corpus", type=Path, default=ROOT / ".statemgr" / "fuzz")
    given = parser.parse_args()
    guided = importlib.util.find_spec("atheris") is not None
    names = [given.target] if given.target else [*TARGETS]
    seed = given.seed if given.seed is not None else int(time.time())
    print(f"seed {seed}, {'guided by atheris' if guided else 'guided by lines: atheris is not installed'}", flush=True)
    seconds = given.minutes * 60 / len(names) * min(2, len(names))
    right = True
    with ThreadPoolExecutor(2) as pool:
        for is_right, said in pool.map(lambda name: fuzz([name], seconds, seed, given.corpus, guided=guided), names):
            right = right and is_right
            print(said, flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
