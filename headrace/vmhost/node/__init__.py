"""Sandboxes of one node: pool, capacity, leases of slots, diagnosis."""
