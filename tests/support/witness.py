"""Hostile names, and the interpreter's own audit events as witnesses of what is done with them (PEP 578)."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

MODULE = "zz_never_imported"
"""Importable, and part of every hostile name."""
NAMES = (
    f"{MODULE}:run",
    f"{MODULE}:run/x",
    f"{MODULE}.inner:run/x",
    f"cProfile:run/__import__('{MODULE}')",
    f"os:system/{MODULE}",
    f"mix/{MODULE}:run/x*2+generated/train",
    f"../{MODULE}",
    f"a/../../{MODULE}",
    f"/{MODULE}.safetensors",
    f"{MODULE}:run\0",
    f"..\\{MODULE}",
    f"http://{MODULE}.invalid:80",
    f"http://127.0.0.1:9/{MODULE}",
    f"file:///{MODULE}",
    f"{{{{ cycler.__init__.__globals__.os.system('{MODULE}') }}}}/../x",
    f"--{MODULE}/../x",
    f"\u0441{MODULE}:run/x",
    f"{MODULE}\n",
)
SOME = NAMES[::4]
"""For tests that run by default."""
WATCHED = ("import", "open", "os.", "shutil.", "subprocess.", "socket.", "ctypes.", "sqlite3.", "urllib.", "tempfile.")
EVENTS: list[tuple[str, str]] = []
_listening = False


def _witness(event: str, args: tuple[Any, ...]) -> None:
    if _listening and event.startswith(WATCHED):
        text = repr(args)
        if MODULE in text:
            EVENTS.append((event, text[:300]))


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """No hostile name reaches an audit event in this block, and none is a module after it."""
    global _listening
    if not getattr(_witness, "added", False):
        sys.addaudithook(_witness)
        _witness.added = True  # type: ignore[attr-defined]
    EVENTS.clear()
    _listening = True
    try:
        yield
    finally:
        _listening = False
    assert EVENTS == []
    assert [name for name in sys.modules if MODULE in name] == []
