"""Serves a process's metrics over HTTP and writes the address to a file, so that Prometheus finds every process.

Prometheus reads the file by file-based service discovery: ``file_sd_configs: [{files: [runs/*/targets/*.json]}]``
(deploy/prometheus/prometheus.yml). A restarted process replaces its file. Every request needs the key in
``Authorization: Bearer``; a page in a browser can neither know nor send it.
"""

import hmac
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET6

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import CollectorRegistry

from headrace import secret_files
from headrace.errors import BROKER, HeadraceError
from headrace.metrics import process

REFUSED = b"expected Authorization: Bearer and the key of metrics\n"
CLIENT_S = 10.0
"""Seconds for a request to arrive and for its answer to be read."""


class PortTaken(HeadraceError, exit_status=BROKER):
    """The configured port cannot be used; the text is one sentence."""


def key_of(configured: str, runs: Path) -> str:
    """The key of metrics: that of the configured file, or of <run dir>/metrics.key, which is made if it is missing.
    runs: the folder of runs. secret_files.SecretError; OSError when the file cannot be made."""
    path = Path(configured) if configured else runs / "metrics.key"
    if not configured:
        secret_files.read_or_make(path, secrets.token_urlsafe(32).encode())
    return secret_files.token(str(path), "[metrics] key")


class Exposition:
    """An HTTP server in a thread of its own; `close` ends it and removes the target file."""

    def __init__(self, host: str, port: int, key: str, targets: Path, name: str, labels: Mapping[str, str]) -> None:
        """key: the secret that requests must carry. targets: folder for the target file <name>.json. port 0 takes a
        free one. PortTaken."""
        try:
            self._server = (_Server6 if ":" in host else ThreadingHTTPServer)((host, port), _handler(key))
        except OSError as error:
            raise PortTaken(
                f"port {port} on {host} cannot serve metrics ({error.strerror}): every process needs one of its own, "
                "so set [metrics] port = 0, or run one process per host"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"
        self._file = targets / f"{name}.json"
        targets.mkdir(parents=True, exist_ok=True)
        entry = [{"targets": [self.address], "labels": {**labels, "process": name}}]
        scratch = self._file.with_suffix(".new")
        scratch.write_bytes(msgspec.json.encode(entry))
        scratch.replace(self._file)

    def close(self) -> None:
        """Stop answering."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server6(ThreadingHTTPServer):
    address_family = AF_INET6


def _handler(key: str) -> type[BaseHTTPRequestHandler]:
    """The handler of requests that carry a key."""
    expected = f"Bearer {key}".encode()

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_S

        def do_GET(self) -> None:
            """The metrics, under every path."""
            given = self.headers.get("Authorization", "").encode("utf-8", "replace")
            allowed = hmac.compare_digest(given, expected)
            text = generate_latest(registry()) if allowed else REFUSED
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST if allowed else "text/plain; charset=utf-8")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Write no line for a request."""

    return Handler


def registry() -> CollectorRegistry:
    """The registry of this process."""
    return process.registry
