"""Errors of a host: each is one sentence that says what to do."""


class VmhostError(Exception):
    """This machine cannot provide the sandbox; the text says why, and what to change."""
