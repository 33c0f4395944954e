"""Differences between versions, and the loader that runs inside the server: played on the server's own layout."""

import base64
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.engines.server.backend import IncompatibleServer
from headrace.engines.server.weights.checksums import fused
from headrace.engines.sglang import sparse
from headrace.engines.sglang.backend import digest
from headrace.weights import tensor_state
from tests.support import tiny
from tests.support.engines import Versions
from tests.support.sglang.cuda import loader
from tests.support.sglang.requests import attached
from tests.support.weights import step

CONFIG = tiny.config("bfloat16")


class Inside:
    """The server's model, as far as a loader sees it."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.live = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in fused(state, CONFIG).items()}

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.live.items()

    def sums(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.live.items()}


@pytest.fixture(scope="module")
def apply() -> Any:
    return loader()


def given(file: Path) -> list[Any]:
    """The tensors that arrive in the server's scheduler."""
    (payload,) = sparse.body(file, "5-x")["serialized_named_tensors"]
    tensors: list[Any] = pickle.loads(base64.b64decode(payload))
    return tensors


def test_what_differs_turns_one_version_into_the_other(tmp_path: Path, apply: Any) -> None:
    before = tiny.model(CONFIG, exact=False).state()
    after = step(before, 3, density=0.01)
    after["lm_head.weight"] = after["lm_head.weight"].clone()
    after["lm_head.weight"][0, 0] = -0.0
    before["lm_head.weight"][0, 0] = 0.0
    for name, state in (("old", before), ("new", after)):
        tensor_state.write(tmp_path / name, state)
    file = tmp_path / "changes"
    size = sparse.write(file, tmp_path / "old", tmp_path / "new", CONFIG, "bfloat16")
    assert 0 < size == file.stat().st_size < (tmp_path / "new").stat().st_size / 4
    inside = Inside(before)
    ((name, tensor),) = given(file)
    assert name == str(file) and tensor.to("cpu").numel() == 0
    apply(inside, given(file))
    assert inside.sums() == Inside(after).sums(), "to the bit, a zero's sign too"


def test_what_does_not_fit_is_left_alone(tmp_path: Path, apply: Any, capfd: pytest.CaptureFixture[str]) -> None:
    before = tiny.model(CONFIG, exact=False).state()
    for name, state in (("old", before), ("new", step(before, 3, density=0.01))):
        tensor_state.write(tmp_path / name, state)
    file = tmp_path / "changes"
    assert sparse.write(file, tmp_path / "old", tmp_path / "new", CONFIG, "bfloat16")
    last = list(Inside(before).live)[-1]
    for harm in ("gone", "wide", "precise"):
        inside = Inside(before)
        if harm == "gone":
            del inside.live[last]
        elif harm == "wide":
            inside.live[last] = torch.nn.Parameter(torch.cat([inside.live[last].data] * 2))
        else:
            inside.live[last] = torch.nn.Parameter(inside.live[last].data.float())
        sums = inside.sums()
        apply(inside, given(file))
        assert inside.sums() == sums, "not even what would fit"
    apply(inside, given(tmp_path / "no such file"))
    assert capfd.readouterr().out.count("nothing of") == 4


def test_an_error_while_it_writes_does_not_end_the_server(
    tmp_path: Path, apply: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    inside = Inside(tiny.model(CONFIG, exact=False).state())
    sums = inside.sums()
    name, tensor = next(iter(inside.live.items()))
    beyond = {f"{name}.at": torch.tensor([tensor.numel()]), f"{name}.to": torch.ones(1, dtype=tensor.dtype)}
    save_file(beyond, tmp_path / "changes", metadata={name: str(tensor.numel())})
    apply(inside, given(tmp_path / "changes"))
    assert "a part of" in capfd.readouterr().out and inside.sums() == sums


def test_versions_far_apart_are_loaded_whole(tmp_path: Path) -> None:
    for seed in (1, 2):
        tensor_state.write(tmp_path / str(seed), tiny.model(CONFIG, exact=False, seed=seed).state())
    tensor_state.write(tmp_path / "3", tiny.model(tiny.config("bfloat16", vocab=384), exact=False).state())
    for other in ("2", "3"):
        file = tmp_path / "changes"
        assert not sparse.write(file, tmp_path / "1", tmp_path / other, CONFIG, "bfloat16")
        assert not file.exists()


@pytest.mark.anyio
async def test_a_server_without_the_loader_is_refused_and_never_asked_for_it(tmp_path: Path) -> None:
    versions = Versions(tiny.config(), tmp_path, exact=False)
    with pytest.raises(IncompatibleServer, match="--custom-weight-loader"):
        async with attached(versions, tmp_path, sparse=True):
            pass
