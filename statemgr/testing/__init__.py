"""What tests of other packages may import: :class:`JobTester` and the suites in :mod:`statemgr.testing.conformance`."""

from statemgr.testing.job_tester import JobTester, OutputRecord

__all__ = ["JobTester", "OutputRecord"]
