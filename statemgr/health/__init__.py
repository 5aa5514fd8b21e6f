"""How a job is: its tasks, their stages and backups, and what is wrong."""
