"""How large a job gets: requests, bytes, cost and times of a planned job, from formulas and a simulation."""
