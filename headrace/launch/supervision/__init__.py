"""Child processes of a run: kept alive, explained when they die, ended together."""
