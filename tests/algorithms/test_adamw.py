"""AdamW with moments in bfloat16, against the formula in float64."""

import pytest
import torch
from torch import Tensor

from headrace.algorithms import adamw
from headrace.algorithms.adamw import AdamW, OptimizerSettings
from headrace.config import Config, ConfigError, load

NARROW = OptimizerSettings(moments=torch.bfloat16)


def updated(draw: int, settings: list[OptimizerSettings]) -> tuple[Tensor, AdamW, Tensor]:
    """A parameter after an update with each of the settings, its optimizer, and the formula's result in float64."""
    generator = torch.Generator().manual_seed(draw)
    parameter = torch.randn(1000, generator=generator)
    want, first, second = parameter.double(), torch.zeros(1000).double(), torch.zeros(1000).double()
    optimizer = AdamW({"w": parameter}, settings[0])
    for step, each in enumerate(settings, 1):
        parameter.grad = torch.randn(1000, generator=generator)
        first, second = first.to(each.moments).double(), second.to(each.moments).double()
        first = first * 0.9 + parameter.grad.double() * 0.1
        second = second * 0.95 + parameter.grad.double().square() * 0.05
        want -= 1e-2 * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        first, second = first.to(each.moments).double(), second.to(each.moments).double()
        optimizer.settings = each
        optimizer.step(1e-2, parameter)
    return parameter, optimizer, want


def test_moments_are_rounded_between_updates_and_nowhere_else() -> None:
    parameter, optimizer, want = updated(1, [NARROW] * 8)
    assert (parameter.double() - want).abs().max() < 2e-5, "a moment at the border of two numbers may fall to the other"
    moments = optimizer.moments[parameter]
    assert {moments.exp_avg.dtype, moments.exp_avg_sq.dtype} == {torch.bfloat16} and moments.step == 8.0
    assert not torch.equal(parameter, updated(1, [OptimizerSettings()] * 8)[0])


def test_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = updated(2, [NARROW] * 3)[0]
    monkeypatch.setattr(adamw, "PIECE", 64)
    assert torch.equal(updated(2, [NARROW] * 3)[0], whole)


def test_the_dtype_may_change_between_updates() -> None:
    parameter, optimizer, want = updated(3, [OptimizerSettings()] * 2 + [NARROW] * 2 + [OptimizerSettings()])
    assert (parameter.double() - want).abs().max() < 2e-5
    assert optimizer.moments[parameter].exp_avg.dtype == torch.float32


@pytest.mark.parametrize("moments", ["bfloat16", "eight_bit"])
def test_a_beta_that_rounded_moments_cannot_follow_is_refused(tmp_path: pytest.TempPathFactory, moments: str) -> None:
    file = str(tmp_path) + "/run.toml"
    with open(file, "w", encoding="utf-8") as out:
        out.write(f'[algorithm]\nmoments = "{moments}"\n')
    assert isinstance(load(file), Config)
    with pytest.raises(ConfigError, match=r"algorithm.beta2: expected at most 0.99 .* got 0.999"):
        load(file, ["algorithm.beta2=0.999"])
