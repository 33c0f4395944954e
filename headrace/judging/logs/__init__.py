"""Parsers of test logs, by format. A log is text that the candidate's process wrote: it can be forged."""
