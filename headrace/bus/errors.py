"""The errors of the bus, each a type with a code that a caller can act on."""

from typing import Literal

from headrace.errors import BROKER, MACHINE, HeadraceError


class BusError(HeadraceError, exit_status=BROKER):
    """An operation of the bus failed; the text is one sentence for a person."""


class NoBroker(BusError):
    """No broker answers at the address, or none with which a TLS connection can be made."""


class CredentialsRefused(BusError):
    """The broker refuses the credentials of the role."""


class BusTimeout(BusError):
    """No answer in time. The request may or may not have been carried out."""


class NoResponders(BusError):
    """No subscriber answers on that subject now."""


class Disconnected(BusError):
    """The connection broke during the wait; the client reconnects by itself."""


class Denied(BusError):
    """The broker does not allow this role that subject."""

    def __init__(self, role: str, action: Literal["publish on", "subscribe to"], subject: str) -> None:
        super().__init__(f"role {role!r} may not {action} {subject}")
        self.role, self.action, self.subject = role, action, subject


class WrongSequence(BusError):
    """Another writer was faster: the expected last sequence is not the last one any more."""

    def __init__(self, text: str, last: int = -1) -> None:
        super().__init__(text)
        self.last = last
        """The sequence that the broker has instead; -1 when it did not say."""


class MessageGone(BusError, LookupError):
    """That message is not in the stream: purged, aged out, or never written."""


class StreamMissing(BusError):
    """The broker has no such stream or bucket, or an outdated one. An operator has to declare them; waiting does not
    help."""


class CorruptPayload(BusError):
    """A claim check's payload has another size or content than the reference says. Asking again does not help."""


class ApiError(BusError):
    """JetStream answered with an error. `status` is HTTP-like, `err_code` its own number."""

    def __init__(self, text: str, status: int = 0, err_code: int = 0) -> None:
        super().__init__(text)
        self.status, self.err_code = status, err_code


class Reject(HeadraceError):
    """Raised by a handler: this message can never be handled. It becomes a dead letter with this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Retry(HeadraceError):
    """Raised by a handler that cannot handle the message now. It is delivered again after `delay` seconds."""

    def __init__(self, delay: float = 1.0, reason: str = "") -> None:
        super().__init__(reason or f"again in {delay:g} s")
        self.delay, self.reason = delay, reason


class Unrecoverable(HeadraceError, exit_status=MACHINE):
    """Raised by an actor for an error that a restart would not remove: its supervisor gives up at once, which ends the
    run."""
