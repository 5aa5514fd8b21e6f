"""The version of statemgr."""

__version__ = "0.1.0"
