"""Floor 4: flows. Each reads as its numbered steps: restore, commit, publish, clean-up."""
