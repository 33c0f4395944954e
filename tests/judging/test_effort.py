"""The price of effort by kind, from TOML to the reward and its parts."""

import msgspec
import pytest

from headrace.config import parse
from headrace.judging.scoring import Rewarder
from headrace.judging.verdicts import NoVerdict, Verdict
from headrace.messages.rollout import TokenKinds
from headrace.registry import PluginError
from tests.support.judging import trajectory

pytestmark = pytest.mark.anyio

WEIGHTS = "length_thinking_tokens = 0\nlength_call_tokens = 60\nlength_text_tokens = 40\nlength_calls = 0\n"


async def test_the_kinds_of_an_attempt_have_the_weights_of_the_configuration() -> None:
    rewarder = Rewarder.of(parse(f"[algorithm.options.reward]\nlength_penalty = 0.001\nlength_turns = 200\n{WEIGHTS}"))
    made, verdict = trajectory("r", "g", {}), Verdict(decision="passed")
    (turn,) = made.turns
    counted = msgspec.structs.replace(
        made, turns=(msgspec.structs.replace(turn, kinds=TokenKinds(thinking=1, calls=1)),)
    )
    reward = await rewarder.reward(counted, verdict)
    assert reward == pytest.approx(0.8), "x is 0 + 60 + 40 + 0 + 200, and C(300) is 200"
    assert rewarder.parts(counted, verdict, reward) == {"verdict": 1.0, "effort": pytest.approx(-0.2)}
    with pytest.raises(NoVerdict, match="set length_thinking_tokens, length_call_tokens and length_text_tokens to one"):
        await rewarder.reward(made, verdict)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("length_text_tokens = -1", "length_text_tokens"),
        ("length_calls = 1e7", "length_calls"),
        ("length_k = 0", "length_k"),
        ("overlong_penalty = 0.5", "overlong_penalty needs overlong_tokens of at least 1"),
        ("nothing = 1", "options.reward.nothing: rewards 'shaped' has no such option"),
    ],
)
def test_what_cannot_work_is_refused(text: str, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        Rewarder.of(parse(f"[algorithm.options.reward]\n{text}\n"))
