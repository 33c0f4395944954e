"""Seconds until the broker redelivers a message whose actor was killed.

A working actor restarts the wait each time a third of it has passed. The value therefore bounds the delay after a kill
and not the duration of the work. A shorter wait costs more of these small messages, and work is done twice when its
process pauses for longer than the wait (a stopped machine, an overloaded host).
"""

DEFAULT_S = 30.0
"""For consumers whose messages take milliseconds and for which a delay after a kill does no harm."""
WORK_S = 10.0
"""For attempts and verdicts. The trainer waits for the group of an attempt that was lost, so a killed rollout actor
stops the whole run for this long. An actor that pauses for longer finds its attempt at another actor, which went on
from the turns on record."""
DEAD_LETTER_S = 2.0
"""Writing a dead letter takes milliseconds, and writing it twice is harmless: the broker stores it once."""
