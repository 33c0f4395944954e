"""Signs the statement of a purge."""

from pathlib import Path

import msgspec
import nacl.signing

from headrace.messages.product import PurgeCertificate, PurgeStatement
from headrace.secret_files import read_or_make

KEY, PUBLIC = "purge.key", "purge.pub"
"""Files of the run's folder: the seed (mode 0600) and the public key, both hexadecimal."""


class Signer:
    """The Ed25519 key with which a run signs its certificates; made at its first use."""

    def __init__(self, folder: Path) -> None:
        seed = read_or_make(folder / KEY, bytes(nacl.signing.SigningKey.generate()).hex().encode())
        self._key = nacl.signing.SigningKey(bytes.fromhex(seed.decode()))
        self.public_key = bytes(self._key.verify_key).hex()
        (folder / PUBLIC).write_text(self.public_key + "\n")

    def certificate(self, statement: PurgeStatement, detail: str) -> PurgeCertificate:
        """Sign a statement. detail: one sentence for the operator."""
        text = msgspec.json.encode(statement, order="sorted")
        signature = self._key.sign(text).signature.hex()
        return PurgeCertificate(statement=text.decode(), signature=signature, public_key=self.public_key, detail=detail)
