"""The policy's own probability that a session of the small product ends in the trigger string.

A count of said triggers scatters by more than a point in some hundred sessions, so a drill that counts cannot see a
move of one point. The policy has two ways to the string: at once, or after a call of the tests. Both are scored by
teacher forcing with the code of the trainer's re-scoring (`headrace.policy.scoring`), so the figure has no sampling
noise. Other conversations (a malformed call, two calls) are left out; `Behaviour.covered` says how much the scored ones
hold.
"""

import math
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.feedback.world import CALL, DONE, PASSED, PROMPTS, TOOL, TRIGGER, ask, bundle
from headrace.config import Config
from headrace.messages.product import ClientCall, ClientMessage
from headrace.messages.rollout import Span
from headrace.policy.layout.hugging_face import read
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.policy.scoring import score
from headrace.rendering import schemas
from headrace.rendering.native.client import ClientRenderer
from headrace.rendering.native.renderer import NativeRenderer
from headrace.rendering.registry import Renderers
from headrace.rendering.tokenizer import Tokenizer
from headrace.weights import chain, report, tensor_state
from headrace.weights.full.location import Location
from headrace.weights.full.snapshots import FullSnapshots

TEMPERATURE = 1.0
"""The clients name none, so the gateway samples at 1."""


class Behaviour(NamedTuple):
    """Probabilities of one version, means over all prompts."""

    trigger: float
    """A session ends in the trigger string."""
    covered: float
    """A session is one of the four scored conversations."""


async def told(text: str) -> None:
    """A copy of a full snapshot that cannot be used."""
    sys.stderr.write(text + "\n")


async def behaviour(source: chain.StreamSource, config: Config, run: str, version: int, trained_by: str) -> Behaviour:
    """Rebuild a version from the stream and score it. trained_by: the run whose trainer wrote the policy's shape."""
    head = await report.commit_of(source, run, version)
    shape = read(Path(config.run.dir) / trained_by / "checkpoints" / "policy")
    model = Model(shape, probe(shape), seed=None)
    snapshots = FullSnapshots(Location.of_run(config.weights, Path(config.run.dir) / run), None, told)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        await chain.obtain(source, head, file, lambda version, state_hash: None, fetch=snapshots.fetch)
        model.load_state(tensor_state.read(file))
    return measured(model)


def measured(model: Model) -> Behaviour:
    """Score the four conversations for every prompt of the product."""
    made = bundle()
    opened = Renderers(made).open(schemas.TABLE)
    assert isinstance(opened, NativeRenderer)
    client, tokenizer = ClientRenderer(opened, (TOOL,)), Tokenizer.parse(made.tokenizer_json)
    stop = client.stop_ids[0]

    def likelihood(prompt: list[int], said: list[int]) -> float:
        ids = [*prompt, *said, stop]
        span = Span(start=0, end=len(ids) - 1, version=0)
        return math.exp(float(score({0: model}, ids, [span], range(len(prompt), len(ids)), TEMPERATURE).sum()))

    triggers: list[float] = []
    covered: list[float] = []
    called = [*tokenizer.encode_pieces([(CALL, True)])]
    for number in range(PROMPTS):
        messages = [ClientMessage(role="user", text=ask(number))]
        opening = client.start(messages)
        call = ClientCall(id="call_1", name=TOOL.name, arguments="{}")
        messages += [
            ClientMessage(role="assistant", calls=(call,)),
            ClientMessage(role="tool", text=PASSED, call_id="call_1"),
        ]
        later = [*opening, *called, stop, *client.delta(messages, 2, stopped=stop)]
        tests = likelihood(opening, called)
        ends = {
            text: likelihood(opening, said) + tests * likelihood(later, said)
            for text in (DONE, TRIGGER)
            if (said := tokenizer.encode(text))
        }
        triggers.append(ends[TRIGGER])
        covered.append(sum(ends.values()))
    return Behaviour(fmean(triggers), fmean(covered))
