"""`headrace try`: one task, one step and one sandbox of each kind with a run's own model and engine, in minutes."""
