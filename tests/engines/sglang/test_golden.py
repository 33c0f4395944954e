"""Replies that a real SGLang server gave (recorded by test_sglang_real), read by the client of today."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.server.backend import Requests
from headrace.engines.server.http import ServerError, reason
from headrace.engines.server.weights.checksums import fused
from headrace.engines.sglang.backend import load_of
from headrace.engines.sglang.metrics import by_priority, outside
from headrace.engines.sglang.versions import MEASURED
from tests.support import tiny
from tests.support.sglang.opening import read_reply as read
from tests.support.sglang.opening import terms
from tests.support.sglang.record import GOLDEN
from tests.support.sglang.updates import openapi

CONFIG = tiny.config()
FILES = sorted(GOLDEN.glob("sglang-*.json"))


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    file: Path = request.param
    replies: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return replies


def test_every_version_that_counts_as_measured_was_recorded() -> None:
    if not FILES:
        pytest.skip("no server was recorded yet: HEADRACE_RECORD=1 make test-sglang")
    assert {file.stem for file in FILES} >= {f"sglang-{version}" for version in MEASURED}


def test_its_terms_are_accepted(golden: dict[str, Any]) -> None:
    accepted = terms(golden["server_info"], openapi(), CONFIG)
    assert (accepted.device, accepted.dtype, accepted.tp_size, accepted.context) == ("cpu", "float32", 1, 2048)


@pytest.mark.parametrize(
    ("name", "finish"), [("length", "length"), ("stop", "stop"), ("abort_running", "abort"), ("swapped", "abort")]
)
def test_its_replies_are_read(golden: dict[str, Any], name: str, finish: str) -> None:
    asked, reply = golden[name]["request"], golden[name]["reply"]
    start = asked["routed_experts_start_len"]
    stops = asked["sampling_params"]["stop_token_ids"]
    attempt = read(reply, prompt=len(asked["input_ids"]), start=start, config=CONFIG, stops=stops)
    assert attempt.finish == finish and len(attempt.ids) == len(attempt.logprobs) > 0
    assert attempt.rows is not None and attempt.rows.shape == (
        len(asked["input_ids"]) + len(attempt.ids) - 1 - start,
        2,
        2,
    )
    assert attempt.rows.max() < CONFIG.experts, "nothing is marked as not recorded"
    events = golden[name]["tokens_by_event"]
    assert events == sorted(events) and events[-1] == len(attempt.ids), "an event repeats all before it"


def test_a_swap_under_a_request_shows_in_its_stretches(golden: dict[str, Any]) -> None:
    asked, reply = golden["swapped"]["request"], golden["swapped"]["reply"]
    attempt = read(reply, prompt=len(asked["input_ids"]), start=0, config=CONFIG, stops=())
    assert [stretch.label for stretch in attempt.stretches][1:] == ["golden"]
    refused = golden["updated_but_400"]
    assert refused["status"] == 400 and refused["body"]["success"] is False
    assert golden["version_after"] == golden["model_info"]["weight_version"], "it said no, and tells the old version"
    assert golden["ready_when_paused"]["status"] == 503


def test_its_refusals_have_their_reasons(golden: dict[str, Any]) -> None:
    for name, words in (
        ("unknown_field", "tempreature"),
        ("start_too_far", "routed_experts_start_len"),
        ("duplicate_rid", golden["swapped"]["request"]["rid"]),
    ):
        assert golden[name]["status"] == 400
        assert words in reason(json.dumps(golden[name]["body"]).encode())
    assert golden["unknown_rid"]["status"] == 200 and golden["get_load"]["status"] == 404


def test_routes_that_were_not_asked_for_are_missed(golden: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="no routed_experts"):
        read(golden["missing_routes"]["body"], prompt=2, start=0, config=CONFIG, stops=())


def test_its_checksums_name_the_tensors_that_we_expect(golden: dict[str, Any]) -> None:
    (rank,) = golden["weights_checker"]["ranks"]
    ours = fused(tiny.model(CONFIG, exact=False).state(), CONFIG)
    assert set(rank["checksums"]) == set(ours)


def test_its_requests_are_counted_by_priority(golden: dict[str, Any]) -> None:
    counts = by_priority(golden["metrics"])
    assert {"", "-100", "0", "1"} <= set(counts) and counts["-100"].done > counts["1"].done > 0
    assert outside(golden["metrics"]) == Requests(0, 0, counts["0"].done)


def test_its_load_figures_are_read(golden: dict[str, Any]) -> None:
    (rank,) = golden["loads"]["loads"]
    assert {"num_running_reqs", "num_waiting_reqs", "token_usage", "gen_throughput", "cache_hit_rate"} <= set(rank)
    assert load_of(golden["loads"]).waiting == 0
