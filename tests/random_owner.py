"""An owner of tasks, or of the whole job, in its own process: ``python -m tests.random_owner '<config>'``.

The process reads orders as lines of JSON from standard input and answers on standard output. An order has ``do``, the
arguments of that method, and a ``plan``: ``die``, ``stop`` or ``fail`` at a phase; ``lost`` loses the next commit's
acknowledgement, before it arrives (``early``) or after (``late``); ``unsettled`` is the number of times that the commit
cannot be settled then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import statemgr.flows.owner
from statemgr import JobConfig, StateManager, StatemgrError, Store, Task
from statemgr.engine import open_attempt
from statemgr.errors import OutcomeUnknownError, RetryableError, UnavailableError
from statemgr.kafka.transactions.publisher import TransactionalPublisher
from statemgr.model.checkpoint import Checkpoint
from statemgr.phases import Phase, add_observer

Items = Iterable[tuple[str, str | None]]
_plan: dict[str, Any] = {}
_commit, _settle = TransactionalPublisher._commit, statemgr.flows.owner.Owner.settle


def _observe(phase: Phase, _: str) -> None:
    for what, number in (("die", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        if _plan.get(what) == phase:
            del _plan[what]
            os.kill(os.getpid(), number)
    if _plan.get("fail") == phase:
        del _plan["fail"]
        raise UnavailableError("planned")


def _lose(self: TransactionalPublisher, current: Any, deadline: float, *args: Any) -> None:
    lost = _plan.pop("lost", None)
    _commit(self, current, self._clock.monotonic() if lost == "early" else deadline, *args)
    if lost == "late":
        raise OutcomeUnknownError("planned")


def _cannot_settle(owner: statemgr.flows.owner.Owner) -> bool:
    if _plan.get("unsettled", 0) > 0:
        _plan["unsettled"] -= 1
        raise OutcomeUnknownError("planned")
    return _settle(owner)


def _write(store: Store, items: Items) -> None:
    for key, value in items:
        store.delete(key.encode()) if value is None else store.put(key.encode(), value.encode())


def _content(store: Store) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in store.range()}


def _number(checkpoint: Checkpoint | None) -> int:
    return checkpoint.input_offsets["orders-0"] if checkpoint else 0


class Owner:
    """The methods that a test can order. The input offset of a commit is the number that identifies it."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._manager = StateManager(config)
        self._tasks: dict[str, Task] = {}

    def open(self, task: str) -> dict[str, Any]:
        """Open a task."""
        self._tasks[task] = opened = self._manager.open_task(task)
        return {"base": _number(opened.last_checkpoint), "content": _content(opened.store("totals"))}

    def commit(self, task: str, number: int, items: Items) -> dict[str, Any]:
        """Write to a task and commit it."""
        _write(self._tasks[task].store("totals"), items)
        self._tasks[task].commit({"orders-0": number})
        return {}

    def close(self, task: str) -> dict[str, Any]:
        """Close a task."""
        self._tasks.pop(task).close()
        return {}

    def acquire(self) -> dict[str, Any]:
        """Take over the whole job."""
        self._epoch = self._manager.acquire()
        self._checkpoints = self._epoch.checkpoints
        return {"bases": {task: _number(checkpoint) for task, checkpoint in self._checkpoints.items()}}

    def publish(self, numbers: Mapping[str, int], items: Mapping[str, Items]) -> dict[str, Any]:
        """Attempt each task, then publish all of them. Repeat the publish while a retry may help."""
        prepared = []
        for task, number in numbers.items():
            with open_attempt(self._config, task, self._checkpoints[task], self._epoch) as attempt:
                _write(attempt.store("totals"), items[task])
                prepared.append(attempt.prepare({"orders-0": number}))
        for left in (2, 1, 0):
            try:
                self._checkpoints = dict(self._manager.publish(prepared, wait=False))
                break
            except (OutcomeUnknownError, RetryableError):
                if not left:
                    raise
        self._epoch = self._epoch.after_publish()
        return {}


def main() -> None:
    """Carry out orders until the input ends."""
    add_observer(_observe)
    TransactionalPublisher._commit = _lose  # type: ignore[method-assign]
    statemgr.flows.owner.Owner.settle = _cannot_settle  # type: ignore[method-assign]
    owner = Owner(JobConfig.from_mapping(json.loads(sys.argv[1])))
    for line in sys.stdin:
        order = json.loads(line)
        _plan.clear()
        _plan.update(order.pop("plan"))
        try:
            answer = getattr(owner, order.pop("do"))(**order)
        except StatemgrError as error:
            answer = {"error": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
