"""The retry policy of blob requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """When to try again.

    ``max_retries`` -1 leaves it to ``max_duration_ms``. The n-th wait is ``backoff_ms`` · ``factor``ⁿ⁻¹,
    at most ``backoff_max_ms``; ``jitter`` (0 to 1) is the share of it that is random.
    """

    max_retries: int = 10
    max_duration_ms: int = 120_000
    backoff_ms: int = 100
    backoff_max_ms: int = 10_000
    factor: float = 2.0
    jitter: float = 0.5
