"""The size of a planned job: its requests, bytes, cost and times, from formulas and a simulation."""
