"""Commands that measure policies, judges and this machine."""
