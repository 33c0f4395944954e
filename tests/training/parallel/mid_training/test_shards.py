import os
import select
import signal
import subprocess
import sys

import msgspec
import pytest
import torch

from headrace.config import load
from headrace.policy.layout.hugging_face import of_run
from headrace.training.parallel.mid_training.shards import Shards, Share, backward, first_share, shares
from tests.support.paths import ROOT
from tests.support.world import model
from tests.training.test_mid_training import Text

TEXTS = [Text([300, *range(20 + n, 30 + n)]) for n in range(12)]


def gradients(net: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def test_the_loss_is_the_weighted_mean_over_next_tokens() -> None:
    net = model()
    pair = [Text([5, 6, 7, 8], [9.0, 1.0, 0.0, 0.5]), Text([9, 10], [9.0, 2.0])]
    expected = weight = 0.0
    for text in pair:
        with torch.no_grad():
            hidden = net(torch.tensor(text.ids[:-1]), [len(text.ids) - 1])
            logp, _ = net.selected_logprobs(hidden, torch.tensor(text.ids[1:]))
        expected -= float((logp * torch.tensor(text.weights[1:])).sum())
        weight += sum(text.weights[1:])
    assert backward(net, shares(pair, 1)[0]) == pytest.approx(expected / weight, rel=1e-5)


def test_shares_are_in_order_and_about_equal() -> None:
    first, second = shares(TEXTS, 2)
    assert first.lengths + second.lengths == [11] * 12
    assert first.ids + second.ids == [token for text in TEXTS for token in text.ids]
    assert (len(first.lengths), len(second.lengths)) == (6, 6)
    assert first.divisor == second.divisor == 120.0
    assert [len(share.lengths) for share in shares(TEXTS[:1], 3)] == [1, 0, 0]


def test_the_parent_takes_less_of_a_small_policy_because_it_makes_the_texts() -> None:
    first, second = shares(TEXTS, 2, 0.5)
    assert (len(first.lengths), len(second.lengths)) == (3, 9)
    demo = of_run(load(ROOT / "deploy" / "demo.toml"))
    large = msgspec.structs.replace(demo, dim=2048, layers=24, expert_dim=4096, vocab=50_000)
    assert first_share(demo) == pytest.approx(0.665, abs=0.01) and first_share(large) > 0.99
    net = model()
    with Shards(net, 2) as shards:
        frames: list[bytes] = []

        def send(frame: bytes) -> bool:
            frames.append(frame)
            return False

        shards._helpers[0].send = send  # type: ignore[method-assign]
        shards.backward(TEXTS)
    sent = msgspec.msgpack.decode(frames[0], type=Share)
    assert sent == shares(TEXTS, 2, first_share(net.config))[1] != shares(TEXTS, 2)[1]


def test_two_processes_give_the_gradient_of_one_also_when_one_was_killed() -> None:
    alone, shared = model(), model()
    loss = backward(alone, shares(TEXTS, 1)[0])
    with Shards(shared, 2) as shards:
        assert shards.backward(TEXTS) == pytest.approx(loss, rel=1e-5)
        for left, right in zip(gradients(alone), gradients(shared), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
        assert shards.lost == 0
        whole = gradients(shared)
        shared.zero_grad()
        process = shards._helpers[0]._process
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        shards.backward(TEXTS)
        assert shards.lost == 1
        assert all(torch.equal(left, right) for left, right in zip(whole, gradients(shared), strict=True))
        shared.zero_grad()
        shards.backward(TEXTS)
        assert shards.lost == 1
        with torch.no_grad():
            shared.norm.add_(1.0)
    assert torch.equal(shared.norm, alone.norm + 1.0), "weights outlive the memory that the helpers saw"
    shared.norm.data.add_(1.0)


def test_a_helper_does_not_outlive_its_parent() -> None:
    script = (
        "import sys, time\n"
        "from headrace.training.parallel.mid_training.shards import Shards\n"
        "from tests.support.world import model\n"
        "from tests.training.parallel.mid_training.test_shards import TEXTS\n"
        "shards = Shards(model(), 2).__enter__()\n"
        "shards.backward(TEXTS)  # the helper has imported torch\n"
        "print(shards._helpers[0]._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        helper = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            ended, _, _ = select.select([helper], [], [], 30.0)
            assert ended, "the helper is still there"
        finally:
            os.close(helper)
