"""The benchmark: trials as evaluations, attempts read from the streams, and the report of one policy or of two."""
