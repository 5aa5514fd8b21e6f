"""What a user holds: a task, its stores, its metrics, and a standby copy."""
