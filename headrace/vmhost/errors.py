"""What can go wrong with a host: one sentence that says what to do."""


class VmhostError(Exception):
    """This machine can't serve sandboxes as asked; the text says why, and what to change."""
