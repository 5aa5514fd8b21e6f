"""How groups of tests get to workers: as pytest-xdist does it, but the run outlives a worker that dies."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadGroupScheduling


class OutlivingScheduling(LoadGroupScheduling):  # type: ignore[misc]
    """Gives what a dead worker has left to the worker that replaces it.

    The scheduler of pytest-xdist also hands out units that are done, and then waits for ever for their tests. With
    ``--reruns``, the test that the worker died in runs once more; otherwise it has failed.
    """

    def remove_node(self, node: Any) -> str | None:
        """Take the units of ``node`` back. Returns the test in which it died, if it was in one."""
        units = self.assigned_work.pop(node)
        left = {scope: [test for test, done in unit.items() if not done] for scope, unit in units.items()}
        died_in = next((tests.pop(0) for tests in left.values() if tests), None)
        # the worker that comes gets them when it has collected: a test that runs once more must stay with its group
        self.workqueue.update({scope: dict.fromkeys(tests, False) for scope, tests in left.items() if tests})
        return died_in

    def mark_test_pending(self, item: str) -> None:
        """Run ``item`` once more."""
        self.workqueue.setdefault(self._split_scope(item), {})[item] = False

    def _reschedule(self, node: Any) -> None:
        """Give ``node`` more work, or tell it that no more comes: a worker runs a test when it knows the next one."""
        super()._reschedule(node)
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._reschedule(node)

    def _assign_work_unit(self, node: Any) -> None:
        """Hand out the next unit. The worker may have had a part of the same group before."""
        scope, unit = self.workqueue.popitem(last=False)
        self.assigned_work.setdefault(node, {}).setdefault(scope, {}).update(unit)
        collected = self.registered_collections[node]
        node.send_runtest_some([collected.index(test) for test in unit])
