"""Hypothesis settings for a shared machine: no test fails because it is slow, and every failure can be repeated.

``STATEMGR_TEST_EXAMPLES`` is the number of examples per property (20). Histories of stores and jobs take longer, so
they run a fraction of that number.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# pytest enforces time limits. How long an example takes says nothing about the property.
settings.register_profile(
    "statemgr",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=int(os.environ.get("STATEMGR_TEST_EXAMPLES", "20")),
)
settings.load_profile("statemgr")
