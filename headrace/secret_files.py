"""A key file that the first process that needs it makes, and that every other process reads."""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def read_or_make(path: Path, content: bytes) -> bytes:
    """The content of a file of mode 0600; made with `content` if there is none. A file that is there is complete, also
    when two processes make it at once: the one that comes second reads the other's."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(content)
        try:
            with suppress(FileExistsError):
                os.link(part, path)
        finally:
            part.unlink()
    return path.read_bytes()
