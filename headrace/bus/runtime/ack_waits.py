"""Seconds until the broker redelivers a message whose actor was killed.

A working actor restarts the wait each time a third of it has passed. The value therefore bounds the delay after a kill
and not the duration of the work. A shorter wait costs more of these small messages, and work is done twice when its
process pauses for longer than the wait (a stopped machine, an overloaded host).
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
