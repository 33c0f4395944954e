"""Every type of the table: one step of reinforcement learning on recorded tokens against a plain loop, then checkpoint,
resume and export."""

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headrace.messages.rollout import RendererBundle
from headrace.policy.hugging.model import HuggingModel
from headrace.policy.layout import hugging_face
from headrace.policy.layout.export import Export, export
from headrace.policy.numerics_probe import probe
from headrace.policy.provider import build, new_cache
from headrace.training import checkpoint
from headrace.training.batches.micro_batch import MicroBatch, forward
from headrace.training.batches.segment import Segment
from headrace.training.gradient import accumulate
from headrace.training.state import TrainerState
from headrace.training.step import take
from tests.support import model_types
from tests.support.model_types import CLIP, HEAT, QUICK, RECIPE, TYPES, batch, segments

KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in TYPES]
BUNDLE = RendererBundle(
    renderer="hermes", tokenizer_json="{}", chat_template="", special_tokens={}, eos_ids=(2,), generation={}
)


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return model_types.folder(tmp_path / str(request.param), str(request.param))


def opened(folder: Path) -> HuggingModel:
    shape = hugging_face.read(folder, "transformers")
    model = build(shape, probe(shape, exact=False))
    assert isinstance(model, HuggingModel)
    model.load(folder)
    return model


def written(model: HuggingModel, folder: Path, target: Path, tensors: Mapping[str, Tensor]) -> None:
    """The export of a version of a run that began with `folder`."""
    parts = Export(config=model.config, tensors=tensors, bundle=BUNDLE, card="", stops=(2,), source=str(folder))
    export(parts, target)


class Forced(torch.overrides.TorchFunctionMode):
    """The recorded experts in place of those that a router chooses: the next layer's at every call."""

    def __init__(self, routed: Tensor) -> None:
        super().__init__()
        self.layers = list(routed.unbind(1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk) and args[0].shape[-1] == 4 and out[1].shape[-1] == 2:
            if args[0].dim() == 2:  # not the two best of each group
                indices = self.layers.pop(0)
                return torch.return_types.topk((args[0].gather(-1, indices), indices))
        return out


def by_hand(model: Any, parts: list[Segment]) -> float:
    """The loss of a plain loop, one sequence after the other; its gradient goes to the model's parameters."""
    tokens, total = sum(len(part.targets) for part in parts), 0.0
    for part in parts:
        with Forced(part.routed) if part.routed is not None else contextlib.nullcontext():
            logits = model(input_ids=part.ids[None]).logits[0]
        logp = torch.log_softmax(logits[part.positions].float() / HEAT, -1).gather(1, part.targets[:, None])[:, 0]
        weight = (logp.detach() - part.behaviour).exp().clamp(max=CLIP)
        loss = -(weight * part.advantage * logp).sum() / tokens
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


def near(got: Tensor, wanted: Tensor) -> bool:
    return float((got - wanted).detach().norm()) <= 1e-5 * float(wanted.detach().norm())


def test_a_packed_step_is_that_of_a_plain_loop(folder: Path) -> None:
    model, reference = opened(folder), model_types.plain(folder)
    forced = segments(model.config)
    live = [dataclasses.replace(part, routed=None) for part in forced]
    state = TrainerState(model)
    for recompute, parts in ((False, live), (True, live), (False, forced), (True, forced)):
        reference.zero_grad()
        model.recompute = recompute
        made = accumulate(state, batch(parts), RECIPE)
        loss = by_hand(reference, parts)
        assert made.loss == pytest.approx(loss, rel=1e-5)
        wanted = {f"inner.{name}": parameter.grad for name, parameter in reference.named_parameters()}
        got = dict(state.gradients())
        learned = [name for name, grad in wanted.items() if grad is not None and grad.any()]
        assert learned and set(learned) <= set(got)
        assert near(*(torch.cat([of[name].flatten() for name in learned]) for of in (got, wanted)))


def test_another_sequence_changes_no_bit(folder: Path) -> None:
    model = opened(folder)
    parts = segments(model.config)
    other = dataclasses.replace(parts[1], ids=parts[1].ids.flip(0))
    device = torch.device("cpu")
    first = forward(model, MicroBatch.of(parts, device))[0]
    second = forward(model, MicroBatch.of([parts[0], other, *parts[2:]], device))[0]
    count = [len(part.targets) for part in parts]
    before, after = torch.split(first, count), torch.split(second, count)
    assert not torch.equal(before[1], after[1])
    for at in (0, 2, 3):
        assert torch.equal(before[at], after[at])


def test_resume_and_export_keep_every_bit(folder: Path, tmp_path: Path) -> None:
    model = opened(folder)
    parts = segments(model.config)
    state = TrainerState(model)
    assert not take(state, batch(parts), RECIPE).failed
    checkpoint.save(tmp_path / "saved.safetensors", state)
    fresh = TrainerState(build(model.config, model.numerics))
    checkpoint.load(tmp_path / "saved.safetensors", fresh)
    assert take(state, batch(parts), RECIPE).state_hash == take(fresh, batch(parts), RECIPE).state_hash

    tensors = state.published()
    target = tmp_path / "out"
    written(model, folder, target, tensors)
    assert (target / "notes" / "LICENSE").read_bytes() == (folder / "notes" / "LICENSE").read_bytes()
    ours, theirs = dict(model.inner.named_parameters()), model_types.plain(target)
    read = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    assert all(torch.equal(parameter, read[name]) for name, parameter in ours.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(target).state_dict()
    assert again.keys() == model_types.plain(folder).state_dict().keys()
    # Published tensors and the folder's files have the same names: servers read both.
    assert set(tensors) == names(target)
    changed = [
        name for name, parameter in model_types.plain(folder).named_parameters() if not near(ours[name], parameter)
    ]
    assert len(changed) > len(ours) // 2


LOADED = """
import sys, torch, transformers
transformers.logging.set_verbosity_error()
for line in sys.stdin:
    kind, folder = line.split()
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        print("unknown to", transformers.__version__, flush=True)
        continue
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            torch.save(model(torch.arange(3, 23)[None]).logits[0], folder + "/logits.pt")
        print("read", flush=True)
    except Exception as error:
        print(type(error).__name__, repr(str(error)), flush=True)
"""
OLDER = os.environ.get("HEADRACE_TRANSFORMERS_4", "")
"""A Python with transformers 4.57."""


@pytest.fixture(scope="module")
def older() -> Iterator[subprocess.Popen[str]]:
    """A process of transformers 4: a type and a folder as a line in, what became of it as a line out."""
    if not OLDER:
        pytest.skip("no environment of transformers 4")
    with subprocess.Popen([OLDER, "-c", LOADED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_transformers_4_reads_the_export(kind: str, tmp_path: Path, older: subprocess.Popen[str]) -> None:
    folder = model_types.folder(tmp_path / kind, kind)
    model, target = opened(folder), tmp_path / "out"
    written(model, folder, target, model.state())
    assert older.stdin is not None and older.stdout is not None
    print(kind, target, file=older.stdin, flush=True)
    said = older.stdout.readline().strip()
    if said.startswith("unknown to"):
        pytest.skip(said)
    assert said == "read"
    with torch.no_grad():
        wanted = model.logits(model(torch.arange(3, 23), [20]))
    # 4.57 computes the coefficients of apertus's activation in bfloat16, whatever dtype is asked.
    assert torch.allclose(torch.load(target / "logits.pt"), wanted, atol=0.05 if kind == "apertus" else 1e-4)


def names(folder: Path) -> set[str]:
    from safetensors import safe_open

    out: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            out |= set(opened.keys())
    return out


def test_a_cached_forward_is_the_packed_one(folder: Path) -> None:
    model = opened(folder)
    ids = torch.randint(3, 96, (20,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        routes: list[Tensor] = []
        whole = model(ids, [20], None, routes)
    cache = new_cache(model.config, 2)
    parts = []
    for start, end in ((0, 9), (9, 10), (10, 20), (4, 20)):  # the last one is cut back into what the cache holds
        parts.append(model.forward_cached(ids[start:end], [end - start], [start], [[0]], cache, None, []))
    assert torch.allclose(torch.cat(parts[:3]), whole, atol=1e-5)
    assert torch.allclose(parts[3], whole[4:], atol=1e-5)
