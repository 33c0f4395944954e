"""Test logs of ten frameworks as outcomes. A log is text that the candidate's process wrote: it can be forged."""
