"""Replies of large models: 48 layers and top 8 are 2 kB of base64 per row, and other turns go on while one is read."""

import asyncio
import base64
import json
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.engines.server.http import Wire
from headrace.engines.sglang.backend import Sglang
from headrace.engines.sglang.options import SglangOptions
from tests.support import tiny
from tests.support.sglang import opening

pytestmark = pytest.mark.anyio

ROWS = 16384
CONFIG = msgspec.structs.replace(tiny.config(), layers=48, experts=128, top_k=8)
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
content = open(sys.argv[1], "rb").read()
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *args):
        pass
server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""In a process of its own: what it computes must not delay the measured loop."""


async def longest_lag(stop: asyncio.Event) -> float:
    """The longest time in seconds for which the event loop ran nothing else."""
    longest, before = 0.0, time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    return longest


async def test_the_loop_serves_other_turns_while_a_large_reply_is_decoded(tmp_path: Path) -> None:
    """Before, the routes were decoded on the event loop, so its lag was the time that `read` takes."""
    routes = np.random.default_rng(0).integers(0, CONFIG.experts, (ROWS, CONFIG.layers, CONFIG.top_k), dtype="<i4")
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, token % 320, None] for token in range(ROWS)],
        "weight_versions": [{"version": "a", "start": 0, "end": ROWS}],
        "routed_experts": base64.b64encode(routes.tobytes()).decode(),
    }
    reply = {"output_ids": [token % 320 for token in range(ROWS)], "meta_info": meta}
    stream = tmp_path / "stream"
    stream.write_bytes(b"data: " + json.dumps(reply).encode() + b"\n\ndata: [DONE]\n\n")
    assert stream.stat().st_size > 32e6
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(stream), stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    wire = Wire(f"http://127.0.0.1:{int(await server.stdout.readline())}")
    server_of = Sglang(CONFIG, SglangOptions(), wire, tmp_path / "stage")
    lags, directs = [], []
    try:
        for _ in range(3):
            began = time.perf_counter()
            direct = opening.read_reply(reply, prompt=1, config=CONFIG)
            directs.append(time.perf_counter() - began)
            stop = asyncio.Event()
            lag = asyncio.create_task(longest_lag(stop))
            attempt = await server_of.generate(opening.ask((0,), left=ROWS), lambda ids: None)
            stop.set()
            lags.append(await lag)
            assert attempt.ids == direct.ids and attempt.logprobs == direct.logprobs
            assert attempt.rows is not None and (attempt.rows == np.sort(routes, axis=-1)).all()
    finally:
        await wire.close()
        server.kill()
        await server.wait()
    print(f"longest lag {1e3 * min(lags):.0f} ms, decoding alone {1e3 * min(directs):.0f} ms")
    assert min(lags) < 0.6 * min(directs)
