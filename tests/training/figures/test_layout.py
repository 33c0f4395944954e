"""The longest sequence, and how many weights an update changes: what the memory plan counts for both."""

import msgspec
import pytest

from headrace.config import Limits
from headrace.policy.layout.sizes import parameters
from headrace.training.device import TrainerError, check_memory
from headrace.training.figures.layout import Layout, changed_share, layout_of
from headrace.training.memory_plan import plan
from tests.support.world import CONFIG, POLICY
from tests.training.test_memory_plan import ADAPTED, QWEN


def test_the_undo_entries_follow_the_learning_rate() -> None:
    shares = [changed_share(QWEN["30B-A3B"], rate) for rate in (1e-7, 1e-6, 1e-5, 1e-2, 0.0)]
    assert shares == sorted(shares) and 0.01 < shares[1] < 0.1 and shares[-2:] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert changed_share(POLICY, 1e-6) == changed_share(ADAPTED, 1e-6) == 1.0
    layout = Layout(devices=8, learning_rate=1e-6, versions=2)
    shallow = msgspec.structs.replace(QWEN["0.6B"], layers=2)
    few, whole = (plan(shallow, layout._replace(learning_rate=rate)).undo for rate in (1e-6, 1e-2))
    assert whole == pytest.approx(2 * 2 * parameters(shallow).total / 8, rel=1e-6) and few < whole / 5


def test_a_sequence_longer_than_a_micro_batch_is_planned_and_refused() -> None:
    limits = Limits(max_turn_tokens=16, context_tokens=65536, reserve_tokens=64)
    config = msgspec.structs.replace(CONFIG, limits=limits)
    short, long = layout_of(CONFIG), layout_of(config)
    assert (short.tokens, short.inputs) == (64, 608), "a context of 512 tokens ends up to two turns behind its limit"
    assert (long.tokens, long.inputs) == (64, 65536)
    needed = plan(POLICY, long)
    assert needed.passes > 20 * plan(POLICY, short).passes
    with pytest.raises(TrainerError, match="with micro-batches of up to 65536 tokens"):
        check_memory(needed, long, needed.total - 1, 0)
    check_memory(needed, long, needed.total, 0)
    base = msgspec.structs.replace(config.feedback, base="r")
    assert layout_of(msgspec.structs.replace(config, feedback=base)).longest == 32768 + 2 * 4096, "users' sessions"
