"""The real vLLM server beyond the cases of every engine: it is lost, it hashes, and what its CPU build cannot do."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from headrace.engines.server.http import ServerError
from headrace.engines.server.weights import checksums
from headrace.engines.server.weights.lock import NotServed
from headrace.engines.vllm.backend import GENERATE
from headrace.messages.rollout import Span
from headrace.rendering.tokenizer import Tokenizer
from tests.support import tiny
from tests.support.adapters import Adapters, are_served
from tests.support.chat_formats import tokenizer_json
from tests.support.engines import Versions, keeps_a_schema, request
from tests.support.sglang.opening import ask
from tests.support.sglang.requests import begun
from tests.support.vllm.server_fixture import real, vllm_engine

pytestmark = [pytest.mark.anyio, pytest.mark.vllm]
DENSE = tiny.config(heads=4, kv_heads=2, experts=0, top_k=0)


async def test_a_server_that_is_killed_is_started_again_and_its_turn_sent_again(tmp_path: Path) -> None:
    versions = Versions(DENSE, tmp_path, exact=False)
    async with real(versions, tmp_path) as engine:
        await versions.load(engine, 1)
        work = asyncio.create_task(engine.sample(request(ids=(1, 2), tokens=1500)))
        await begun(engine)
        server = engine._server
        assert server is not None and server.process is not None
        os.killpg(server.process.pid, signal.SIGKILL)
        sample = await work
        assert sample.spans == (Span(0, 1501, 1),) and server.starts == 2 and engine.counts["lost"] == 1
        stats = engine.stats()
        assert stats["checked"] and not stats["unchecked"], "what it does not pack away is compared"
        served = await engine._backend.checksums(1)
        wanted = checksums.expected(versions.files[1][0], DENSE, "float32", checksums_of(engine))
        assert not checksums.difference(wanted, served) and sum(map(bool, served.values())) > 5
        other = checksums.expected(versions.files[2][0], DENSE, "float32", checksums_of(engine))
        assert checksums.difference(other, served)


async def test_an_id_that_the_guard_keeps_out_ends_a_server_and_it_is_started_again(tmp_path: Path) -> None:
    versions = Versions(DENSE, tmp_path, exact=False)
    async with real(versions, tmp_path) as engine:
        body = engine._backend.body(ask())  # type: ignore[attr-defined]
        with pytest.raises(ServerError) as caught:
            async for _ in engine._wire.events(GENERATE, body | {"token_ids": [1, 99_999]}):
                pass
        assert caught.value.kind in ("refused", "gone")
        assert len((await engine.sample(request(tokens=3))).ids) == 3


async def test_an_answer_keeps_its_schema(tmp_path: Path) -> None:
    """The weights are random: without the grammar the text would be no JSON."""
    (file := tmp_path / "tokenizer.json").write_text(tokenizer_json())
    tokenizer = Tokenizer.load(file)
    stop = tokenizer.tags["<|im_end|>"]
    config = tiny.config(heads=4, kv_heads=2, experts=0, top_k=0, vocab=-(-len(tokenizer) // 64) * 64)
    async with real(Versions(config, tmp_path, exact=False), tmp_path, file) as engine:
        await keeps_a_schema(engine, tokenizer, stop)


async def test_adapters_are_loaded_beside_the_checkpoint(tmp_path: Path) -> None:
    versions = Adapters(DENSE, tmp_path)
    engine = vllm_engine(versions.config, tmp_path, swap="abort")
    try:
        await are_served(engine, versions)
    finally:
        await engine.stop()


def checksums_of(engine: object) -> checksums.Digest:
    """The server's own function."""
    digest = engine._backend.digest("cpu", 0)  # type: ignore[attr-defined]
    assert digest is not None
    return digest  # type: ignore[no-any-return]


async def test_the_cpu_build_records_no_routes_and_says_so(tmp_path: Path) -> None:
    versions = Versions(tiny.config(heads=4, kv_heads=2), tmp_path, exact=False)
    engine = vllm_engine(versions.config, tmp_path)
    try:
        with pytest.raises(NotServed):
            await versions.load(engine, 0)
        assert engine._server is not None
        log = engine._server.log.read_text(errors="replace")
        assert re.search("AuxOutput Connector requires Model Runner V2", log)
    finally:
        await engine.stop()
