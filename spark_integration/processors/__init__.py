"""Spark's arbitrary stateful operators on statemgr's state. They run ``StatefulProcessor`` classes unchanged."""
