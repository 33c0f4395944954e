"""Tasksets of the library verifiers (v1), read and scored by the Python of an environment of their own."""
