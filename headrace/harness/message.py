"""Episodes without a sandbox: the policy writes one message, and a checker grades it. There are no tools."""

import time
from collections.abc import Sequence

import msgspec

from headrace.engines.base import Sampler
from headrace.harness.context import Context
from headrace.harness.loop import Episode, OnDone, OnSampled, sample_turn
from headrace.harness.prompt import initial_prompt
from headrace.messages.rollout import RolloutRequest, Turn
from headrace.messages.tasks import Task
from headrace.rendering.base import Renderer


async def run_message(
    *,
    engine: Sampler,
    renderer: Renderer,
    request: RolloutRequest,
    task: Task,
    on_sampled: OnSampled,
    on_done: OnDone,
    resume: Sequence[Turn] = (),
) -> tuple[Episode, str]:
    """Sample the message, or take the recorded one; return the episode and the message's text without the reasoning.

    resume: the logged turns. A message that ends at the token limit is an outcome too: the checker grades the text up
    to that point. EngineError.
    """
    start = time.monotonic()
    context = Context(renderer, initial_prompt(request, task), request.limits.context_tokens)
    prompt = context.next_ids()
    if resume:
        turn = resume[0]
    else:
        session = f"{request.trajectory}/0"
        try:
            turn = await sample_turn(
                engine, renderer, request, context, prompt, "act", (), session, left=request.limits.max_tokens
            )
        finally:
            await engine.close(session)
        turn = msgspec.structs.replace(turn, calls=())
        await on_sampled(turn)
        await on_done(turn.index, ())
    ids = [int(id) for id in turn.ids.tolist()]
    episode = Episode(
        turns=(turn,),
        outcome="finished" if turn.stop == "stop" else "max_tokens",
        malformed_calls=0,
        sampled_tokens=len(ids),
        wall_s=time.monotonic() - start,
    )
    return episode, renderer.parse(ids, prompt=prompt).text.strip()
