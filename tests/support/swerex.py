"""A SWE-ReX server of its own for a test. SWE-ReX is installed in an environment of its own, on PATH."""

import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

_START_S = 120.0


class Server(NamedTuple):
    """A server that listens."""

    url: str
    key_file: str
    """The file with its token."""
    process: "subprocess.Popen[bytes]"


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """A server on loopback, its token in a file of `folder`; skips the test where SWE-ReX is not installed."""
    program = shutil.which("swerex-remote")
    if program is None:
        pytest.skip("swerex-remote is missing: install swe-rex in an environment of its own and put it on PATH")
    key_file = folder / "swerex.token"
    key_file.write_text(secrets.token_hex(8) + "\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [program, "--host", "127.0.0.1", "--port", str(port), "--auth-token", key_file.read_text().strip()]
    process = subprocess.Popen(words)
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None and time.monotonic() < deadline, "the SWE-ReX server does not listen"
                time.sleep(0.05)
        yield Server(f"http://127.0.0.1:{port}", str(key_file), process)
    finally:
        process.kill()
        process.wait()
