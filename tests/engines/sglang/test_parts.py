"""The parts of the SGLang client that need no engine: the wire, admission, terms, stage, back-pressure."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers
from aiohttp import web

from headrace.engines.base import RefusedVersion
from headrace.engines.server.backend import IncompatibleServer, Load, Stretch
from headrace.engines.server.http import ServerError, Wire, reason
from headrace.engines.server.load import Admission, allowance
from headrace.engines.server.weights import checksums
from headrace.engines.server.weights.staging import Stage, Verified
from headrace.engines.sglang.backend import digest, load_of
from headrace.weights import snapshot, tensor_state
from tests.support import tiny
from tests.support.sglang.double import Double
from tests.support.sglang.opening import generate, terms
from tests.support.sglang.opening import read_reply as read
from tests.support.sglang.updates import openapi

pytestmark = pytest.mark.anyio

CONFIG = tiny.config()
INFO = {
    "version": "0.5.23", "frontend": "python", "device": "cpu", "dtype": "float32", "context_length": 512,
    "enable_return_routed_experts": True,
}  # fmt: skip


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    one = Double(CONFIG)
    await one.start()
    yield one
    await one.close()


async def test_three_error_shapes_are_one_error(double: Double) -> None:
    wire = Wire(double.url)
    good: dict[str, Any] = {"rid": "a" * 32, "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}
    double.hold_at = 1
    held = asyncio.create_task(generate(wire, good, lambda event: None))
    await double.until(lambda: len(double.running) == 1)
    for changes, words in (
        ({"rid": "b" * 32, "sampling_params": {"tempreature": 1}}, "unknown field tempreature"),
        ({"rid": "b" * 32, "routed_experts_start_len": 3}, "must be in"),
        ({}, "Duplicate request ID"),
    ):
        with pytest.raises(ServerError, match=words) as caught:
            await generate(wire, good | changes, lambda event: None)
        assert (caught.value.kind, caught.value.status) == ("refused", 400)
    await double.let_go()
    assert len((await held)["output_ids"]) == 4
    await wire.close()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": "a"}', "a"),
        (b'{"error": {"message": "b", "code": 400}}', "b"),
        (b'{"object": "error", "message": "c"}', "c"),
        (b'{"detail": "d"}', "d"),
        (b"plain", "plain"),
        (b"", "no reason given"),
    ],
)
def test_the_reason_in_an_error_body(body: bytes, words: str) -> None:
    assert reason(body) == words


async def spoken(text: bytes, *, cut: int = 1 << 30, status: int = 200) -> web.AppRunner:
    """A server that answers /generate with these bytes in pieces, and ends."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for at in range(0, len(text), cut):
            await response.write(text[at : at + cut])
            await asyncio.sleep(0)
        return response

    return await served(web.post("/generate", answer))


async def served(route: web.RouteDef) -> web.AppRunner:
    """A server with one route."""
    app = web.Application()
    app.add_routes([route])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


@pytest.mark.parametrize(
    ("text", "cut", "kind"),
    [
        (b'data: {"output_ids": [1], "text": "' + b"x" * (1 << 20) + b'"}\n\ndata: [DONE]\n\n', 4099, ""),
        (b'data: {"output_ids": [1]}\n\ndata: [DONE]\n\n', 1, ""),
        (b'data: {"output_ids": [1]}\n\n', 1 << 30, "gone"),
        (b'data: {"output_ids": [1]}\n\ndata: {"error": {"message": "oh"}}\n\n', 1 << 30, "refused"),
        (b"data: [DONE]\n\n", 1 << 30, "gone"),
        (b"data: {]\n\n", 1 << 30, "garbled"),
    ],
)
async def test_a_stream_is_cut_into_events_of_any_size(text: bytes, cut: int, kind: str) -> None:
    runner = await spoken(text, cut=cut)
    wire = Wire(f"http://127.0.0.1:{runner.addresses[0][1]}")
    if kind:
        with pytest.raises(ServerError) as caught:
            await generate(wire, {}, lambda event: None)
        assert caught.value.kind == kind
    else:
        assert (await generate(wire, {}, lambda event: None))["output_ids"] == [1]
    await wire.close()
    await runner.cleanup()


async def test_nobody_there_is_gone_and_silence_is_late() -> None:
    wire = Wire("http://127.0.0.1:9")
    with pytest.raises(ServerError, match="cannot be reached") as caught:
        await wire.get("/model_info")
    assert caught.value.kind == "gone"
    await wire.close()
    asked = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        await asked.wait()
        return web.Response()

    runner = await served(web.get("/model_info", silent))
    wire = Wire(f"http://127.0.0.1:{runner.addresses[0][1]}")
    with pytest.raises(ServerError, match="did not answer") as caught:
        await wire.get("/model_info", 0.05)
    assert caught.value.kind == "late"
    asked.set()
    await wire.close()
    await runner.cleanup()


def reply(**changes: Any) -> dict[str, Any]:
    """A reply to two context tokens with three sampled ones, routes from row 1 on."""
    rows = np.arange(3 * 2 * 2, dtype="<i4").reshape(3, 2, 2) % 8
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [-0.1, 9, None]],
        "weight_versions": [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 3}],
        "routed_experts": base64.b64encode(rows.tobytes()).decode(),
        "cached_tokens": 1,
    }
    return {"output_ids": [7, 8, 9], "meta_info": meta | changes}


def test_a_reply_becomes_ids_logprobs_rows_and_stretches() -> None:
    attempt = read(reply(), prompt=2, start=1, config=CONFIG, stops=())
    assert attempt.ids == (7, 8, 9) and attempt.logprobs == (-0.5, -1.5, float(np.float32(-0.1)))
    assert attempt.stretches == (Stretch("a", 0, 2), Stretch("b", 2, 3))
    assert attempt.rows is not None and attempt.rows.dtype == np.uint8 and attempt.rows.shape == (3, 2, 2)
    assert attempt.rows.reshape(-1).tolist() == [*range(8), 0, 1, 2, 3] and attempt.cached == 1
    missing = base64.b64encode(np.full((3, 2, 2), -1, "<i4").tobytes()).decode()
    none = read(reply(routed_experts=missing), prompt=2, start=1, config=CONFIG, stops=()).rows
    assert none is not None and (none == 255).all()
    wide = read(reply(), prompt=2, start=1, config=msgspec.structs.replace(CONFIG, experts=300), stops=()).rows
    assert wide is not None and wide.dtype == np.uint16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"routed_experts": "AAAA"}, "not base64 of int32"),
        ({"weight_versions": None}, "do not cover"),
        ({"finish_reason": None}, "lacks"),
    ],
)
def test_what_contradicts_itself_is_refused_at_the_door(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ServerError, match=words) as caught:
        read(reply(**changes), prompt=2, start=1, config=CONFIG, stops=(5,))
    assert caught.value.kind == "garbled"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"frontend": "rust"}, "SGLANG_RUST_SERVER"),
        ({"enable_return_routed_experts": False}, "--enable-return-routed-experts"),
        ({"incremental_streaming_output": True}, "--incremental-streaming-output"),
        ({"dp_size": 2}, "--dp-size 1"),
        ({"speculative_algorithm": "EAGLE"}, "speculative"),
        ({"dtype": "auto"}, "float32 policy in float16 unless told"),
    ],
)
def test_a_server_that_is_unfit_is_told_what_to_change(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(IncompatibleServer, match=words):
        terms(INFO | changes, openapi(), CONFIG)


def test_terms_of_a_fit_server() -> None:
    accepted = terms(INFO, openapi(), CONFIG)
    assert (accepted.context, accepted.dtype) == (512, "float32")
    assert terms(INFO | {"dtype": "bfloat16"}, openapi(), CONFIG).fingerprint != accepted.fingerprint
    dense = tiny.config(experts=0, top_k=0)
    assert terms(INFO | {"enable_return_routed_experts": False}, openapi(), dense).version == "0.5.23"


def test_a_stage_is_a_link_that_outlives_its_source_and_is_what_it_says(tmp_path: Path) -> None:
    state = tiny.model(CONFIG, exact=False).state()
    first = tensor_state.write(tmp_path / "0", state)
    state["model.norm.weight"] = state["model.norm.weight"] + 1
    second = tensor_state.write(tmp_path / "1", state)
    stages = [Stage(tmp_path / name, CONFIG) for name in ("a", "b")]
    for version, state_hash in ((0, first), (1, second), (1, second), (0, first)):
        for stage in stages:
            stage.put(version, str(tmp_path / str(version)), state_hash)
            assert stage.model.samefile(tmp_path / str(version))
            assert not list(stage.folder.glob(".*")), "a part stays"
    (tmp_path / "0").unlink()
    assert snapshot.file_hash(stages[1].model) == first
    with pytest.raises(RefusedVersion):
        stages[0].put(1, str(tmp_path / "1"), first)
    assert snapshot.file_hash(stages[0].model) == first, "a refused version replaces nothing"
    stages[0].remove()
    assert not stages[0].folder.exists()


def test_servers_of_one_node_hash_a_file_once_and_see_that_it_was_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = tensor_state.write(tmp_path / "0", tiny.model(CONFIG, exact=False).state())
    hashed: list[Path] = []

    def counted(path: Path) -> str:
        hashed.append(path)
        return snapshot.Snapshot(path).state_hash()

    monkeypatch.setattr(snapshot, "file_hash", counted)
    verified = Verified()
    for name in "abc":
        Stage(tmp_path / name, CONFIG).put(0, str(tmp_path / "0"), digest, verified)
    assert len(hashed) == 1
    data = bytearray((tmp_path / "0").read_bytes())
    data[-1] ^= 1
    (tmp_path / "0").write_bytes(data)
    with pytest.raises(RefusedVersion):
        Stage(tmp_path / "d", CONFIG).put(0, str(tmp_path / "0"), digest, verified)


@pytest.mark.parametrize("kind", ["", "llama", "mistral"])
def test_a_server_reads_no_end_of_sequence_in_the_staged_folder(tmp_path: Path, kind: str) -> None:
    """transformers gives some architectures an end of their own, at which a server would end turns."""
    dense = tiny.config(heads=2, experts=0, top_k=0, model_type=kind, qk_norm=not kind)
    digest = tensor_state.write(tmp_path / "0", tiny.model(dense, exact=False).state())
    stage = Stage(tmp_path / "stage", dense)
    stage.put(0, str(tmp_path / "0"), digest)
    assert transformers.AutoConfig.from_pretrained(stage.folder).eos_token_id is None


def test_checksums_name_what_differs(tmp_path: Path) -> None:
    state = tiny.model(CONFIG, exact=False).state()
    tensor_state.write(tmp_path / "0", state)
    wanted = checksums.expected(tmp_path / "0", CONFIG, "bfloat16", digest)
    assert checksums.difference(wanted, wanted | {"model.rope.cos_sin_cache": "00"}) == ""
    broken = wanted | {"model.layers.1.mlp.experts.w13_weight": "0" * 16}
    assert "1 of 21 tensors" in checksums.difference(wanted, broken)
    short = {name: value for name, value in wanted.items() if name != "lm_head.weight"}
    assert "lm_head.weight is missing" in checksums.difference(wanted, short)
    assert "such as extra" in checksums.difference(wanted, wanted | {"extra": "00"})


def test_the_allowance_follows_the_servers_own_figures() -> None:
    assert load_of({"loads": [{"num_running_reqs": 3, "token_usage": 0.5}, {"num_running_reqs": 2}]}).running == 5
    assert load_of({}) == Load()
    assert allowance(64, 64, Load(running=40, waiting=24, usage=0.5)) == 40
    assert allowance(40, 64, Load(running=40, usage=0.97)) == 40
    assert allowance(40, 64, Load(running=40, waiting=10, usage=0.97)) == 30
    assert allowance(1, 64, Load(waiting=9, usage=0.99)) == 1
    assert allowance(40, 64, Load(running=20)) == 60 and allowance(60, 64, Load()) == 64


async def test_who_has_no_place_waits_outside_the_server() -> None:
    figures = {"num_running_reqs": 1, "num_waiting_reqs": 2}

    async def ask() -> Load:
        return load_of({"loads": [figures]})

    admission = Admission(3, ask)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def guest() -> None:
        async with admission.place():
            entered.set()
            await leave.wait()

    async with admission.place(), admission.place():
        await admission.look()
        assert admission.allowed == 1
        third = asyncio.create_task(guest())
        await asyncio.sleep(0)
        assert admission.waiting == 1 and not entered.is_set()
        figures.update(num_waiting_reqs=0)
        for _ in range(2):
            await admission.look()
        await entered.wait()
        assert admission.allowed == 3 and admission.inside == 3
        leave.set()
        await third
    assert admission.inside == 0
