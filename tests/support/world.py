"""A task small enough to learn in a test: the policy reads a word and is rewarded for even tokens."""

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from headrace.config import Algorithm, Config, Curriculum, MidTraining, Policy, Trainer
from headrace.messages.base import Array
from headrace.messages.judging import Score
from headrace.messages.rollout import Span, Trajectory, Turn
from headrace.messages.tasks import TaskRef
from headrace.messages.training import BatchGroup, StepManifest
from headrace.policy.cache import KVCache
from headrace.policy.layout import hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.policy.seam import PolicyModel
from headrace.rendering.tokenizer import Tokenizer
from tests.support.records import of

VOCAB = 340
SECTION = Policy(dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, expert_dim=32, vocab=VOCAB)
CONFIG = Config(
    policy=SECTION,
    algorithm=Algorithm(learning_rate=1e-2, warmup_steps=1, constant_tokens=4),
    mid_training=MidTraining(tokens=0, processes=1),
    curriculum=Curriculum(group_size=4, groups_per_step=4, staleness=1),
    trainer=Trainer(threads=1, rescore=3, micro_tokens=64),
)
POLICY = hugging_face.from_section(SECTION)
NUMERICS = probe(POLICY)
TOKENIZER = Tokenizer.train(["some text to learn from"], VOCAB).dump()
WORDS = range(10, 14)


def model(seed: int = 0) -> Model:
    return Model(POLICY, NUMERICS, seed=seed)


class Sampled(NamedTuple):
    """One episode to sample: its group, its slot in the group, and the seed of its word and its draws."""

    group: str
    slot: int
    seed: int


def episode(models: Mapping[int, PolicyModel], group: str, slot: int, seed: int, spans: Sequence[int]) -> Trajectory:
    """One of `episodes`."""
    return episodes(models, [Sampled(group, slot, seed)], spans)[0]


@torch.no_grad()
def episodes(models: Mapping[int, PolicyModel], wanted: Sequence[Sampled], spans: Sequence[int]) -> list[Trajectory]:
    """Two turns of two sampled tokens each; spans[i] is the version that forwards step i (of four) of all of them.

    The episodes are one batch: batch-invariant kernels give each the bits that it has alone.
    """
    count = len(wanted)
    generators = [torch.Generator().manual_seed(request.seed * 100 + request.slot) for request in wanted]
    words = [random.Random(request.seed).choice(WORDS) for request in wanted]
    first = models[spans[0]]
    cache, tables, covered = KVCache(first.config, count), [[number] for number in range(count)], 0
    pending: list[list[int]] = [[] for _ in wanted]
    turns: list[list[Turn]] = [[] for _ in wanted]
    for index in range(2):
        prompts = [[1, word, 2] if index == 0 else [3, 4] for word in words]
        new = [old + prompt for old, prompt in zip(pending, prompts, strict=True)]
        ids: list[list[int]] = [[] for _ in wanted]
        logprobs: list[list[float]] = [[] for _ in wanted]
        routes: list[list[torch.Tensor]] = [[] for _ in wanted]
        forwarded: list[Span] = []
        for draw in range(2):
            version, length = spans[index * 2 + draw], len(new[0])
            recorder: list[torch.Tensor] = []
            hidden = models[version].forward_cached(
                torch.tensor(new).flatten(), [length] * count, [covered] * count, tables, cache, recorder=recorder
            )
            forwarded.append(Span(covered, covered + length, version))
            covered += length
            last = hidden.view(count, length, -1)[:, -1]
            chances = torch.softmax(models[version].logits(last).float(), -1)
            tokens = torch.stack(
                [
                    torch.multinomial(row, 1, generator=generator)[0]
                    for row, generator in zip(chances, generators, strict=True)
                ]
            )
            chosen = models[version].selected_logprobs(last, tokens)[0].tolist()
            rows = torch.stack(recorder, 1).to(torch.uint8) if recorder else torch.empty(len(hidden), 0, 0)
            for number in range(count):
                ids[number].append(int(tokens[number]))
                logprobs[number].append(chosen[number])
                routes[number].append(rows[number * length : (number + 1) * length])
            new = [[int(token)] for token in tokens]
        pending = new
        for number, prompt in enumerate(prompts):
            routed = torch.cat(routes[number])
            turns[number].append(
                Turn(
                    index=index,
                    segment=0,
                    prompt_ids=Array.of(prompt, "<i4"),
                    ids=Array.of(ids[number], "<i4"),
                    logprobs=Array.of(logprobs[number], "<f4"),
                    routed=Array("|u1", tuple(routed.shape), routed.numpy().tobytes()) if recorder else None,
                    spans=tuple(forwarded),
                )
            )
    return [
        of(
            Trajectory,
            run="r",
            group=request.group,
            slot=request.slot,
            id=f"{request.group}-{request.slot}-0",
            task=TaskRef("even", str(word)),
            seed=request.seed,
            turns=tuple(made),
            fingerprint=first.numerics.fingerprint,
        )
        for request, word, made in zip(wanted, words, turns, strict=True)
    ]


def score(trajectory: Trajectory) -> Score:
    said = [token for turn in trajectory.turns for token in turn.ids.tolist()]
    return of(
        Score,
        run="r",
        group=trajectory.group,
        slot=trajectory.slot,
        task=trajectory.task,
        reward=sum(token % 2 == 0 for token in said) / len(said),
        passed=all(token % 2 == 0 for token in said),
    )


Records = tuple[StepManifest, dict[int, Trajectory], dict[int, Score]]


def batch(models: Mapping[int, PolicyModel], version: int, versions: Sequence[int], config: Config = CONFIG) -> Records:
    """A whole batch for `version`, its four forwards per episode made by `versions`."""
    size = config.curriculum.group_size
    names = [f"g{version}x{number}" for number in range(config.curriculum.groups_per_step)]
    wanted = [Sampled(name, slot, version * 10 + number) for number, name in enumerate(names) for slot in range(size)]
    trajectories = dict(enumerate(episodes(models, wanted, versions), 1))
    groups = [
        BatchGroup(
            group=name,
            close_seq=number + 1,
            slots=tuple((number * size + slot + 1, 1001 + number * size + slot) for slot in range(size)),
        )
        for number, name in enumerate(names)
    ]
    manifest = of(
        StepManifest,
        run="r",
        step=version,
        version=version,
        groups=tuple(groups),
        seed=version,
        fingerprint=NUMERICS.fingerprint,
    )
    return manifest, trajectories, {1000 + seq: score(made) for seq, made in trajectories.items()}
