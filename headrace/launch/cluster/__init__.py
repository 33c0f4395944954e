"""A run on several hosts, which ssh reaches and which share no folder: the file, the plan, the hosts, their keepers."""
