"""The identity of code from outside the package: its seam, its name, its version and the hash of its source."""

from headrace.messages.base import Message, message


@message("plugin")
class Plugin(Message, frozen=True, kw_only=True):
    """One plugin that a run uses. Nodes of a run must agree on `source`, because a step is replayed bit for bit."""

    seam: str
    """``tools``, ``engines``, ``sandboxes``, ``suites``, ``rewards``, ``renderers``, ``advantages``, ``losses`` or
    ``checkers``."""
    name: str
    """The entry point's name, or ``module:attribute`` as the configuration has it."""
    version: str = ""
    """Version of the distribution that holds it; empty for a plain file."""
    source: str
    """blake2b-256 of the plugin's Python source, as hexadecimal digits."""
