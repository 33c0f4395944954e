"""Errors of a host: each is one sentence that says what to do."""

from headrace.errors import MACHINE, HeadraceError


class VmhostError(HeadraceError, exit_status=MACHINE):
    """This machine cannot provide the sandbox; the text says why, and what to change."""
