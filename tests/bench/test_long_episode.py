"""Every token of an episode far longer than its window is counted once, and trained as it was sampled."""

import pytest

from benchmarks.long_episode import measure

pytestmark = pytest.mark.anyio


async def test_every_token_of_a_long_episode_is_accounted_for() -> None:
    figures = await measure(25_000, 4096)
    assert figures["outcome"] == "finished" and figures["segments"] > 3 and figures["tokens"] >= 25_000
    wrong = ("requests_that_differ", "tokens_unaccounted", "trained_wrong", "forwarded_wrong")
    assert {name: figures[name] for name in wrong} == dict.fromkeys(wrong, 0)
    kinds = ("prompt_tokens", "sampled_tokens", "tool_tokens", "frame_tokens", "summary_tokens")
    assert sum(figures[kind] for kind in kinds) == figures["tokens"]
