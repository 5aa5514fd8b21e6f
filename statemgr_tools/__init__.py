"""Tools that ship with statemgr but are not part of its runtime: the benchmark, the demo, and local servers."""
