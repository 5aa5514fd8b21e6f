"""The command line: one file a command group (floor 5). Wiring and rendering only."""
