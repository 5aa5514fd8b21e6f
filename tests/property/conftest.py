"""Hypothesis for a shared machine: no test fails because it was slow, and a failure can be repeated.

``STATEMGR_TEST_EXAMPLES`` is the number of examples of a property (50). Histories of stores and jobs take longer, and
try a part of that number.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Time limits are pytest's; how long an example takes says nothing about what it states.
settings.register_profile(
    "statemgr",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=int(os.environ.get("STATEMGR_TEST_EXAMPLES", "50")),
)
settings.load_profile("statemgr")
