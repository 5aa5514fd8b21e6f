"""A deterministic job, shared by child and oracle: the changes of commit k, and the exact state after k commits."""

from __future__ import annotations

import random

from statemgr.model.commit import Change

STORES = ("totals", "index")


def changes(store: str, commit: int) -> list[Change]:
    """Return the changes of a commit (from 1) to ``store``: puts, overwrites, deletes, deletes of absent keys."""
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
    """Return the state of ``store`` after the first ``commits`` commits."""
    content: dict[bytes, bytes] = {}
    for commit in range(1, commits + 1):
        for key, value in changes(store, commit):
            if value is None:
                content.pop(key, None)
            else:
                content[key] = value
    return content
