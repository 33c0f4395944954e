"""The actor runtime: handlers, supervision, traces, logs."""
