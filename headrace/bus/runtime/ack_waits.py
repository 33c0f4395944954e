"""Seconds until the broker delivers a message again whose actor was killed.

An actor at work prolongs the wait every third of it, so the value bounds the delay after a kill, and not the length of
the work. A shorter wait costs more of these small messages, and a process that stands still longer (a stopped machine,
an overloaded host) has its work done twice.
"""

DEFAULT_S = 30.0
"""For consumers whose messages take milliseconds and for which a delay after a kill does no harm."""
ROLLOUT_S = 30.0
"""An attempt takes minutes and a successor has to get its sandbox back: the wait is a small part of that, and a second
rollout actor at the same attempt would be superseded in the middle of a turn."""
JUDGE_S = 10.0
"""A verdict takes seconds, and the group's other slots wait for it."""
DEAD_LETTER_S = 2.0
"""Writing a dead letter takes milliseconds, and writing it twice is harmless: the broker stores it once."""
