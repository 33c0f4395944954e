"""A SWE-ReX server of its own for a test. SWE-ReX is installed in an environment of its own, on PATH."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

TOKEN = "HEADRACE_TEST_SWEREX_TOKEN"
"""The variable that holds the server's token."""
_START_S = 120.0


class Server(NamedTuple):
    """A server that listens."""

    url: str
    process: "subprocess.Popen[bytes]"


@contextmanager
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server on loopback; skips the test where SWE-ReX is not installed."""
    program = shutil.which("swerex-remote")
    if program is None:
        pytest.skip("swerex-remote is missing: install swe-rex in an environment of its own and put it on PATH")
    monkeypatch.setenv(TOKEN, secrets.token_hex(8))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([program, "--host", "127.0.0.1", "--port", str(port), "--auth-token", os.environ[TOKEN]])
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None and time.monotonic() < deadline, "the SWE-ReX server does not listen"
                time.sleep(0.05)
        yield Server(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.wait()
