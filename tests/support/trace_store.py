"""MLflow's server as a store of traces, in an environment of its own in .cache/mlflow, which the first use makes.

MLflow 3.18.0 needs mlflow-skinny 3.18.0, which is not on PyPI; 3.17.2 installs. Arize Phoenix drops links.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.spans import Seen

VERSION = "3.17.2"
PLACE = ROOT / ".cache" / "mlflow"
STARTS_WITHIN_S = 300
READ = """
import json, sys
from mlflow import MlflowClient
client, token = MlflowClient(sys.argv[1]), None
while True:
    page = client.search_traces(locations=["0"], max_results=100, page_token=token)
    for trace in page:
        for span in trace.data.spans:
            links = [(link.trace_id, link.span_id) for link in span.links]
            attributes = {key: str(value) for key, value in span.attributes.items()}
            print(json.dumps((span.name, span.trace_id, span.span_id, span.parent_id or "", links, attributes)))
    token = page.token
    if not token:
        break
"""


def installed() -> Path:
    """The interpreter of the store's environment."""
    python, marker = PLACE / "bin" / "python", PLACE / f".installed-{VERSION}"
    if not marker.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PLACE)], check=True)
        words = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"mlflow=={VERSION}"]
        subprocess.run(words, check=True)
        marker.touch()
    return python


class Store:
    """A running store. url: where spans go by OTLP/HTTP. headers: what the exporter has to send with them."""

    headers = "x-mlflow-experiment-id=0"

    def __init__(self, python: Path, url: str) -> None:
        self._python, self.url = python, url

    def spans(self) -> list[Seen]:
        """All spans that the store holds, read through its client."""
        done = subprocess.run([str(self._python), "-c", READ, self.url], capture_output=True, text=True, env=_quiet())
        assert done.returncode == 0, done.stderr
        return [_seen(*json.loads(line)) for line in done.stdout.splitlines()]


def _quiet() -> dict[str, str]:
    return os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}


def _seen(name: str, trace: str, id: str, parent: str, links: list[list[str]], attributes: dict[str, str]) -> Seen:
    ends = tuple((other.removeprefix("tr-"), span) for other, span in links)
    return Seen(name, trace.removeprefix("tr-"), id, parent, ends, attributes)


@contextmanager
def trace_store(folder: Path) -> Iterator[Store]:
    """A store on loopback whose database is in a folder; ended with all its processes."""
    python = installed()
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db?timeout=120",
        "--artifacts-destination",
        f"{folder}/artifacts",
    ]
    log = (folder / "log").open("wb")
    server = subprocess.Popen(
        [str(python), *words], cwd=folder, stdout=log, stderr=log, env=_quiet(), start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + STARTS_WITHIN_S
        while not _answers(url):
            assert server.poll() is None and time.monotonic() < end, (folder / "log").read_text()[-2000:]
            time.sleep(0.2)
        yield Store(python, url)
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # it holds nothing that is needed, and ends late on a busy machine
        server.wait()
        log.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
