"""The version of statemgr."""

__version__ = "0.2.0"
