"""Child processes of a run: kept alive and ended together, with the cause of each death."""
