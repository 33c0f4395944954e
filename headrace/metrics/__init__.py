"""Prometheus metrics of a process and how they are served; the conditions that every measurement states."""
