"""The decision about a server by its own description, and the table of releases behind the check before a start."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.server.backend import IncompatibleServer
from headrace.engines.sglang import capabilities, versions
from headrace.engines.sglang.part import _release
from headrace.engines.sglang.reply import body
from tests.support import tiny
from tests.support.engines import Versions, request
from tests.support.paths import ROOT
from tests.support.sglang.double import Double
from tests.support.sglang.opening import ask
from tests.support.sglang.requests import attached
from tests.support.sglang.updates import openapi

CONFIG = tiny.config()
DENSE = tiny.config(experts=0, top_k=0)


def without(path: str, field: str = "") -> dict[str, Any]:
    """The real server's description without a path, or without a field of its request."""
    described = openapi()
    if not field:
        del described["paths"][path]
        return described
    (name,) = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(described["paths"][path])))
    del described["components"]["schemas"][name]["properties"][field]
    return described


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(CONFIG, tmp_path_factory.mktemp("versions"), exact=False)


def decided(described: dict[str, Any], *, mixture: bool = True) -> tuple[capabilities.Capabilities, list[str]]:
    return capabilities.decide(capabilities.described(described), mixture=mixture)


def test_the_recorded_server_has_everything() -> None:
    assert decided(openapi()) == (capabilities.Capabilities(), [])
    assert decided({})[1][0] == "turns by token ids needs /generate"


@pytest.mark.parametrize("need", [*capabilities.REQUIRED, *capabilities.REPLAY], ids=lambda need: need.path)
def test_each_missing_need_is_named(need: capabilities.Need) -> None:
    lost = decided(without(need.path))[1]
    assert f"{need.capability} needs {need.path}" in lost
    for field in need.fields:
        (text,) = decided(without(need.path, field))[1]
        assert text == f"{need.capability} needs {field} of {need.path}"


def test_a_dense_policy_needs_no_router_replay() -> None:
    described = without("/generate", "routed_experts_start_len")
    assert decided(described)[1] == ["router replay needs routed_experts_start_len of /generate"]
    assert not decided(described, mixture=False)[1]


def test_optional_capabilities_are_declared_and_nothing_is_refused() -> None:
    for described, name in (
        (without("/update_weights_from_tensor"), "tensors"),
        (without("/update_weights_from_tensor", "weight_version"), "tensors"),
        (without("/begin_weight_update"), "session"),
        (without("/generate", "priority"), "priorities"),
    ):
        able, lost = decided(described)
        assert not lost and not getattr(able, name)


def test_every_field_that_a_turn_sends_is_a_need() -> None:
    asked = body(ask(), sparse=True, seeded=False, priority=1)
    needed = {field for need in capabilities.REQUIRED + capabilities.REPLAY + capabilities.PRIORITIES
              if need.path == "/generate" for field in need.fields}  # fmt: skip
    assert needed == {*asked}


@pytest.mark.anyio
async def test_a_server_is_judged_by_its_answers_and_not_by_its_version(
    files: Versions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    double = Double(CONFIG)
    double.info = {"version": "0.9.1"}
    async with attached(files, tmp_path, double=double) as (engine, _):
        assert (await engine.sample(request())).ids
    (warning,) = [entry.message for entry in caplog.records if entry.levelno == logging.WARNING]
    assert "SGLang 0.9.1, which was neither run nor read (read: 0.5.19 to 0.5.23)" in warning
    double = Double(CONFIG)
    double.openapi = without("/generate", "routed_experts_start_len")
    with pytest.raises(IncompatibleServer, match="router replay needs routed_experts_start_len of /generate"):
        async with attached(files, tmp_path, double=double):
            pass
    double = Double(CONFIG)
    double.openapi = {}
    with pytest.raises(IncompatibleServer, match="without DISABLE_OPENAPI_DOC"):
        async with attached(files, tmp_path, double=double):
            pass


@pytest.mark.anyio
async def test_the_first_turn_shows_what_a_description_does_not_contain(files: Versions, tmp_path: Path) -> None:
    class Old(Double):
        """Replies without the version of each token, as SGLang 0.5.18."""

        def _reply(self, one: Any) -> dict[str, Any]:
            reply = super()._reply(one)
            reply["meta_info"].pop("weight_versions", None)
            return reply

    with pytest.raises(IncompatibleServer, match="first turn cannot be used: weight_versions, the versions that"):
        async with attached(files, tmp_path, double=Old(CONFIG)):
            pass
    double = Double(CONFIG)
    double.drop_routes = True
    with pytest.raises(IncompatibleServer, match="--enable-return-routed-experts"):
        async with attached(files, tmp_path, double=double):
            pass


@pytest.mark.anyio
async def test_a_server_is_asked_for_one_probe_turn_until_its_settings_change(files: Versions, tmp_path: Path) -> None:
    async with attached(files, tmp_path) as (engine, double):
        for version in (1, 2):
            await files.load(engine, version)

        def probes() -> int:
            return sum(str((asked or {}).get("rid")).startswith("probe") for _, asked in double.seen)

        assert probes() == 1
        double.info = {"sampling_backend": "pytorch"}
        engine._life.lost()
        assert (await engine.sample(request())).ids and probes() == 2


def test_the_table_of_releases_is_what_the_check_says() -> None:
    table = json.loads((ROOT / "deploy" / "sglang" / "versions.json").read_text(encoding="utf-8"))
    usable = [release for release, said in table["releases"].items() if said["usable"]]
    assert tuple(usable) == versions.VERIFIED
    for release, said in table["releases"].items():
        assert bool(versions.lacks(release)) == (not said["usable"]), release
        assert _release("url", release).met == said["usable"]
    assert versions.lacks("0.5.17") == "cache_salt, which keeps prefixes of different weights apart"
    assert "weight_versions" in _release("url", "0.5.18").text
    assert not versions.lacks("0.5.24") and not versions.lacks("main") and not versions.lacks("0.6.0.dev1")
    assert "neither run nor read" in _release("url", "0.6.0").text
    assert "it was not run" in _release("url", "0.5.20").text and versions.said("0.5.23") == "SGLang 0.5.23"
