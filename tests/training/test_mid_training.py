import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.config import MidTraining
from headrace.training import mid_training
from headrace.training.checkpoint import UnusableCheckpoint
from headrace.training.mid_training import MidTrainingFailed, Progress, batches, learning_rate, run
from tests.support.world import model

RECIPE = MidTraining(tokens=6000, batch_tokens=100, learning_rate=1e-2, processes=1)


@dataclass
class Text:
    ids: list[int]
    weights: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = self.weights or [1.0] * len(self.ids)


def texts() -> Iterator[Text]:
    """Count upwards from somewhere; the first token is anything."""
    for start in itertools.count():
        yield Text([300, *(20 + (start + i) % 40 for i in range(12))])


def test_learns_what_it_reads() -> None:
    net, seen = model(), list[Progress]()
    steps = run(net, texts(), RECIPE, seen.append, every=10)
    assert seen[-1].step == steps == 63
    assert seen[-1].tokens >= 6000
    assert seen[0].loss > 3.0
    assert seen[-1].loss < 0.8


def test_the_same_traces_give_the_same_bits() -> None:
    left, right = model(), model()
    for net in (left, right):
        run(net, texts(), RECIPE)
    assert all(torch.equal(value, right.state()[name]) for name, value in left.state().items())


class Stop(Exception):
    pass


def stopping(after: int) -> Iterator[Text]:
    """As many as that, and then the trainer is gone."""
    yield from itertools.islice(texts(), after)
    raise Stop


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_was_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.training.mid_training.KEEP_S", 0.0)
    monkeypatch.setattr("headrace.training.mid_training.KEEP_SHARE", math.inf)
    recipe, checkpoint_file = msgspec.structs.replace(RECIPE, tokens=2000, processes=processes), tmp_path / "kept"
    whole, seen = model(), list[Progress]()
    steps = run(whole, texts(), recipe)
    for traces in (stopping(60), stopping(100)):
        with pytest.raises(Stop):
            run(model(), traces, recipe, file=checkpoint_file)
    again = model(seed=9)
    assert run(again, texts(), recipe, seen.append, every=1, file=checkpoint_file) == steps
    assert 5 < seen[0].step < steps == seen[-1].step, "it did not begin again"
    assert all(torch.equal(value, again.state()[name]) for name, value in whole.state().items())


def test_what_was_kept_under_another_recipe_or_damaged_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.training.mid_training.KEEP_S", 0.0)
    monkeypatch.setattr("headrace.training.mid_training.KEEP_SHARE", math.inf)
    checkpoint_file = tmp_path / "kept"
    run(model(), texts(), msgspec.structs.replace(RECIPE, tokens=300), file=checkpoint_file)
    with pytest.raises(MidTrainingFailed, match=r"another \[mid_training\]"):
        run(model(), texts(), RECIPE, file=checkpoint_file)
    checkpoint_file.write_bytes(checkpoint_file.read_bytes()[:-1] + b"x")
    with pytest.raises(UnusableCheckpoint, match="is damaged"):
        run(model(), texts(), RECIPE, file=checkpoint_file)


@pytest.mark.slow
def test_what_was_kept_before_a_key_existed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key had its default then: only another value is another recipe."""
    monkeypatch.setattr(mid_training, "KEEP_S", 0.0)
    monkeypatch.setattr(mid_training, "KEEP_SHARE", math.inf)
    recipe, checkpoint_file = msgspec.structs.replace(RECIPE, tokens=300), tmp_path / "kept"
    older = msgspec.to_builtins(recipe)
    del older["schedule"], older["beta2"]
    with monkeypatch.context() as then:
        then.setattr(mid_training, "_words", lambda _: msgspec.json.encode(older).decode())
        run(model(), texts(), recipe, file=checkpoint_file)
    assert run(model(), texts(), recipe, file=checkpoint_file)
    with pytest.raises(MidTrainingFailed, match=r"another \[mid_training\]"):
        run(model(), texts(), msgspec.structs.replace(recipe, schedule="cosine"), file=checkpoint_file)


@pytest.mark.slow  # parallel/mid_training/test_shards.py compares the gradients of two processes and of one
def test_a_helper_process_changes_nothing_but_the_time() -> None:
    """Two shares by two processes, by one that lost its helper, and by hand: the same weights."""
    recipe = msgspec.structs.replace(RECIPE, tokens=1000, processes=2)
    left, right = model(), model()
    run(left, texts(), recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.executable", "/bin/false")
        run(right, texts(), recipe)
    state = left.state()
    assert all(torch.equal(value, state[name]) for name, value in right.state().items())
    assert not torch.equal(state["lm_head.weight"], model().state()["lm_head.weight"])


def test_batches_are_cut_in_order() -> None:
    made = list(batches([Text([1] * n) for n in (60, 50, 30, 80, 10)], 100))
    assert [[len(text.ids) for text in group] for group in made] == [[60, 50], [30, 80]]


def test_the_rate_rises_and_falls() -> None:
    recipe = MidTraining(learning_rate=1.0, warmup=0.1)
    rates = [learning_rate(recipe, done / 100) for done in range(101)]
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[0] < 0.02
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_the_rate_follows_the_schedule() -> None:
    linear = MidTraining(learning_rate=2.0, warmup=0.2)
    cosine = msgspec.structs.replace(linear, schedule="cosine")
    constant = msgspec.structs.replace(linear, schedule="constant")
    points = (0.2, 0.4, 0.6, 1.0)
    assert [learning_rate(linear, done) for done in points] == pytest.approx([2.0, 1.55, 1.1, 0.2])
    assert [learning_rate(cosine, done) for done in points] == pytest.approx([2.0, 1.1 + 0.9 * 0.5**0.5, 1.1, 0.2])
    assert [learning_rate(constant, done) for done in points] == [2.0, 2.0, 2.0, 2.0]
    assert learning_rate(msgspec.structs.replace(linear, warmup=1.0), 1.0) == 2.0


def test_settings_of_the_optimizer_reach_the_weights() -> None:
    ends = []
    for change in ({}, {"beta2": 0.0}, {"schedule": "constant"}, {"warmup": 0.9}):
        net = model()
        run(net, texts(), msgspec.structs.replace(RECIPE, tokens=300, **change))
        ends.append(net.head.detach().clone())
    assert not any(torch.equal(left, right) for left, right in itertools.combinations(ends, 2))


def test_broken_numbers_stop_it() -> None:
    net = model()
    with torch.no_grad():
        net.head[3, 3] = float("nan")
    with pytest.raises(MidTrainingFailed, match="step 0"):
        run(net, texts(), RECIPE)


def test_progress_is_told_by_time_where_steps_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.training.mid_training.REPORT_S", 0.0)
    seen = list[Progress]()
    steps = run(model(), texts(), msgspec.structs.replace(RECIPE, tokens=500), seen.append)
    assert [progress.step for progress in seen] == list(range(1, steps + 1))


def test_frozen_parameters_stay_and_the_others_learn() -> None:
    net, before = model(), model().state()
    net.embedding.requires_grad_(False)
    run(net, texts(), msgspec.structs.replace(RECIPE, tokens=500))
    after = net.state()
    same = {name for name, value in after.items() if torch.equal(value, before[name])}
    assert same == {"model.embed_tokens.weight"}
