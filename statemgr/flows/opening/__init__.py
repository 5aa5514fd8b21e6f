"""Opening a task or a job: take its topics, check that it may go on, restore its stores, and repair what was lost."""
