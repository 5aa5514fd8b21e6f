"""The command line: the group of all commands, and those that are no operations."""
