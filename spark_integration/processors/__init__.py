"""Spark's arbitrary stateful operators on statemgr's state: ``StatefulProcessor`` classes run as they are."""
