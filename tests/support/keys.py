"""Keys for tests of signatures."""

from headrace.bus.broker.keys import Key
from headrace.weights.signing import Trust

PUBLISHER = Key(b"p" * 32)
STRANGER = Key(b"s" * 32)


def trust(**options: bool) -> Trust:
    """Trust in the publisher alone."""
    return Trust([PUBLISHER.public], **options)
