"""Secrets in files: a key that the first process which needs it makes, and the tokens that an operator puts there."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from headrace.errors import WRONG_INPUT, HeadraceError


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


class SecretError(HeadraceError, exit_status=WRONG_INPUT):
    """A file does not hold a secret; the text is one sentence."""


def token(path: str, key: str) -> str:
    """The secret that is a file's only line. key: the configuration's key that names the file. SecretError."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SecretError(f"{key}: {path} cannot be read ({error.strerror}); expected a file with the secret") from None
    except UnicodeDecodeError:
        raise SecretError(f"{key}: {path} is not UTF-8 text; expected a file with the secret") from None
    if not text or not text.isprintable():
        raise SecretError(f"{key}: expected one line with the secret in {path}, got {len(text.splitlines())}")
    return text
