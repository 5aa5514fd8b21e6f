"""What ``statemgr doctor`` looks at: one file a part. Each check yields findings and raises nothing typed."""

from statemgr.cli.checks.finding import Finding, Status, guarded

__all__ = ["Finding", "Status", "guarded"]
