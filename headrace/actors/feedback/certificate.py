"""Signs the statement of a purge."""

import os
from pathlib import Path

import msgspec
import nacl.signing

from headrace.messages.product import PurgeCertificate, PurgeStatement

KEY, PUBLIC = "purge.key", "purge.pub"
"""Files of the run's folder: the seed (mode 0600) and the public key, both hexadecimal."""


class Signer:
    """The Ed25519 key with which a run signs its certificates; made at its first use."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / KEY
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(bytes(nacl.signing.SigningKey.generate()).hex())
        except FileExistsError:
            pass
        self._key = nacl.signing.SigningKey(bytes.fromhex(path.read_text()))
        self.public_key = bytes(self._key.verify_key).hex()
        (folder / PUBLIC).write_text(self.public_key + "\n")

    def certificate(self, statement: PurgeStatement, detail: str) -> PurgeCertificate:
        """Sign a statement. detail: one sentence for the operator."""
        text = msgspec.json.encode(statement, order="sorted")
        signature = self._key.sign(text).signature.hex()
        return PurgeCertificate(statement=text.decode(), signature=signature, public_key=self.public_key, detail=detail)
