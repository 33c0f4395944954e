"""A run on several hosts that ssh reaches and that share no folder: its file, each host's files, the keepers."""
