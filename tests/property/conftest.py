"""Hypothesis for a shared machine: no test fails because it was slow, and a failure can be repeated."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Time limits are pytest's; how long an example takes says nothing about what it states.
settings.register_profile("statemgr", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("statemgr")
