"""The price of an overlong attempt, from TOML to the reward and its parts."""

import pytest

from headrace.config import parse
from headrace.judging.scoring import Rewarder
from headrace.judging.verdicts import Verdict
from tests.support.judging import trajectory

pytestmark = pytest.mark.anyio

LIMITS = "[limits]\nmax_tokens = 4\nmax_turn_tokens = 4\n"


async def test_an_attempt_near_the_limit_loses_its_share() -> None:
    rewarder = Rewarder.of(parse(f"{LIMITS}[algorithm.options.reward]\noverlong_penalty = 0.5\noverlong_tokens = 2\n"))
    made, verdict = trajectory("r", "g", {}), Verdict(decision="passed")
    reward = await rewarder.reward(made, verdict)
    assert reward == 0.75, "three sampled tokens lie in the middle of the last two"
    assert rewarder.parts(made, verdict, reward) == {"verdict": 1.0, "overlong": -0.25}
