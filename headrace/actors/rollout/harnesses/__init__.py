"""Attempts in which a program of others acts: its endpoint in the sandbox, and the record of its conversations."""
