"""Prometheus metrics of a process, and how they are served."""
