"""The commands `statemgr bench`, `demo` and `dev`."""
