"""Signs the statement of a purge."""

from pathlib import Path

import msgspec
import nacl.signing

from headrace.messages.product import PurgeCertificate, PurgeStatement

PUBLIC = "purge.pub"
"""File of the run's folder: the public key, hexadecimal."""


class Signer:
    """The Ed25519 key with which the feedback actors of a broker sign their certificates."""

    def __init__(self, seed: bytes, folder: Path) -> None:
        """seed: 32 bytes. folder: gets the public key."""
        self._key = nacl.signing.SigningKey(seed)
        self.public_key = bytes(self._key.verify_key).hex()
        (folder / PUBLIC).write_text(self.public_key + "\n")

    def certificate(self, statement: PurgeStatement, detail: str) -> PurgeCertificate:
        """Sign a statement. detail: one sentence for the operator."""
        text = msgspec.json.encode(statement, order="sorted")
        signature = self._key.sign(text).signature.hex()
        return PurgeCertificate(statement=text.decode(), signature=signature, public_key=self.public_key, detail=detail)
