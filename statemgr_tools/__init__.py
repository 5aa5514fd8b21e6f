"""Tools that are shipped with statemgr and are not part of its runtime: the benchmark, the demo, and local servers."""
