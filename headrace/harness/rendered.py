"""Renders a recorded trajectory again and compares it with its record, token for token."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from headrace.harness.context import Context
from headrace.harness.loop import calls_of
from headrace.messages.rollout import Turn
from headrace.rendering.base import Renderer


def differing(
    turns: Sequence[Turn],
    prompt: str,
    renderer: Renderer,
    max_parallel_calls: int,
    *,
    system: str = "",
    later: Sequence[str] = (),
) -> tuple[int, ...]:
    """The turns whose prompt ids, calls or tokens by kind are others than the recorded ones; none when the replay is
    equal.

    prompt: as `initial_prompt` gave it. renderer: of the recorded bundle, tools and wording. system, later: as in
    `Context`. The whole context of every segment is then equal too, because it consists of prompt ids and recorded
    samples.
    """
    contexts: dict[str | UnsetType, Context] = {UNSET: Context(renderer, prompt, 1 << 62, system=system, later=later)}
    indices = []
    for turn in turns:
        if turn.caller not in contexts:
            text = next(c.arguments["text"] for each in turns for c in each.calls if c.id == turn.caller)
            contexts[turn.caller] = Context(renderer, text, 1 << 62, system=system)
        context = contexts[turn.caller]
        asks = turn.kind == "summary" and bool(context.ids)
        ids = context.summary_ids() if asks else context.next_ids()
        sampled = [int(id) for id in turn.ids.tolist()]
        parsed = renderer.parse(sampled, prompt=ids)
        calls = calls_of(parsed, turn.index, max_parallel_calls) if turn.kind == "act" else ()
        kinds = turn.kinds if turn.kinds is UNSET else parsed.kinds
        if ids != turn.prompt_ids.tolist() or calls != turn.calls or kinds != turn.kinds:
            indices.append(turn.index)
        context.take(turn)
    return tuple(indices)
