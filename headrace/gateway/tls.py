"""TLS for the gateway: the certificate of `[production] tls_certificate`, loaded again when its files change.

A renewed certificate takes effect for new connections; open connections keep the certificate of their handshake. The
gateway refuses a certificate that does not match its key: at the start it ends with an error, at a renewal it keeps the
earlier pair until the files change again. So a certificate that is replaced before its key never breaks the listener.
"""

import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Literal

from headrace.config import Production
from headrace.errors import WRONG_INPUT, HeadraceError

RENEW_S = 30.0
"""Seconds between two checks of a certificate's files."""


Event = Callable[[str, str, Literal["info", "error"]], Awaitable[None]]
"""kind, text, level"""
Every = Callable[[float, Callable[[], Awaitable[None]], str], object]
"""interval in seconds, function, name: calls the function at this interval (`Actor.every`)"""


class CertificateError(HeadraceError, exit_status=WRONG_INPUT):
    """Certificate and key cannot be used; one sentence says why."""


class Certificate:
    """The certificate chain and key of a listener, both in PEM. `context` is the server's SSL context."""

    def __init__(self, certificate: str, key: str) -> None:
        """Load the files. CertificateError."""
        self._certificate, self._key = Path(certificate), Path(key)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._seen = self._stamps()
        self._load(self.context)

    def renew(self) -> bool:
        """Load the files again if they changed since the last check. Returns whether they changed.

        CertificateError if they cannot be used; the earlier certificate stays in use.
        """
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        # OpenSSL keeps a new certificate even if its key does not match, so a separate context is tried first.
        self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
        self._load(self.context)
        return True

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._certificate, self._key, password=lambda: "")
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise CertificateError(
                f"certificate {self._certificate} and key {self._key} cannot be used ({_reason(error)}); expected a "
                "PEM certificate chain and its key without a passphrase"
            ) from None

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        """Inode, size and time of change of both files; zeros for one that cannot be read."""
        return tuple(_stamp(path) for path in (self._certificate, self._key))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)


def client_context(certificate: str) -> ssl.SSLContext:
    """The SSL context of a client that trusts this certificate alone, for every host name, and no authority."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def configured(production: Production, every: Every, event: Event) -> Certificate | None:
    """The certificate of `[production]`, None if none is configured. Its files are then checked every `RENEW_S`.

    CertificateError if its files cannot be used: a gateway that is configured for HTTPS never serves HTTP instead.
    """
    if not production.tls_certificate:
        return None
    try:
        certificate = Certificate(production.tls_certificate, production.tls_key)
    except CertificateError as error:
        raise CertificateError(f"[production] tls_certificate: {error}") from None
    every(RENEW_S, partial(renew, certificate, event), "certificate")
    return certificate


async def renew(certificate: Certificate, event: Event) -> None:
    """Load changed files, and publish an event about the result."""
    try:
        if certificate.renew():
            await event("certificate_renewed", "new connections get the renewed certificate", "info")
    except CertificateError as error:
        await event("certificate_refused", f"the earlier certificate stays in use: {error}", "error")
