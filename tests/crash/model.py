"""A deterministic job: what commit k writes, and the exact state after k commits. Shared by child and oracle."""

from __future__ import annotations

import random

from statemgr.model.commit import Change

STORES = ("totals", "index")


def changes(store: str, commit: int) -> list[Change]:
    """What commit number ``commit`` (from 1) does to ``store``: puts, overwrites, deletes, absent deletes."""
    draw = random.Random(f"{store}-{commit}")
    found: list[Change] = []
    for _ in range(60):
        key = f"{draw.randrange(150):05d}".encode()
        if draw.random() < 0.25:
            found.append((key, None))
        else:
            found.append((key, draw.randbytes(draw.choice((0, 20, 400)))))
    return found


def state(store: str, commits: int) -> dict[bytes, bytes]:
    """The state of ``store`` after the first ``commits`` commits."""
    content: dict[bytes, bytes] = {}
    for commit in range(1, commits + 1):
        for key, value in changes(store, commit):
            if value is None:
                content.pop(key, None)
            else:
                content[key] = value
    return content
