"""Serves a process's metrics over HTTP and writes the address to a file, so that Prometheus finds every process.

Prometheus reads the file by file-based service discovery: ``file_sd_configs: [{files: [runs/*/targets/*.json]}]``
(deploy/prometheus/prometheus.yml). A restarted process replaces its file.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from prometheus_client import start_http_server
from prometheus_client.registry import CollectorRegistry

from headrace.metrics import process


class PortTaken(Exception):
    """The configured port cannot be used; the text is one sentence."""


class Exposition:
    """An HTTP server in a thread of its own; `close` ends it and removes the target file."""

    def __init__(self, host: str, port: int, targets: Path, name: str, labels: Mapping[str, str]) -> None:
        """targets: folder for the target file <name>.json. port 0 takes a free one. PortTaken."""
        try:
            self._server, self._thread = start_http_server(port, host, registry())
        except OSError as error:
            raise PortTaken(
                f"port {port} on {host} cannot serve metrics ({error.strerror}): every process needs one of its own, "
                "so set [metrics] port = 0, or run one process per host"
            ) from None
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


def registry() -> CollectorRegistry:
    """The registry of this process."""
    return process.registry
