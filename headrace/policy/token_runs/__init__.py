"""Runs of a micro-batch's tokens: parts that one process or several compute, with the same gradient bits."""
