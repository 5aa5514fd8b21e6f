"""The demo: a stateful query over real rows that is killed and restored, and an independent recount."""
