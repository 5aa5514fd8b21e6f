"""The demo: real rows through a stateful query that is killed and restored, and an independent recount."""
