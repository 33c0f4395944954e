"""Test runs inside the guest."""
