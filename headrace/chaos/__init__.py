"""Fault injection: planned faults, the injector and its report."""
