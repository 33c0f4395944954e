"""Starts a whole run on one machine, follows it to its report, and finds it again.

Heavy modules are imported inside functions, so that the command line stays light.
"""
