"""The benchmark: trials as evaluations, attempts read from the streams, and reports on one policy or on two."""
