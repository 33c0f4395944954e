"""A world small enough to learn in a test: the policy reads a word and is rewarded for even tokens."""

import random
from collections.abc import Mapping, Sequence

import torch

from headrace.config import Algorithm, Config, Curriculum, MidTraining, Policy, Trainer
from headrace.messages.base import Array
from headrace.messages.judging import Score
from headrace.messages.rollout import PolicyRef, Sampling, Span, Trajectory, Turn
from headrace.messages.tasks import TaskRef
from headrace.messages.training import BatchGroup, StepManifest
from headrace.policy.cache import KVCache
from headrace.policy.layout import hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.rendering.tokenizer import Tokenizer

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


@torch.no_grad()
def episode(models: Mapping[int, Model], group: str, slot: int, seed: int, spans: Sequence[int]) -> Trajectory:
    """Two turns of two sampled tokens; spans[i] is the version that forwards step i (of four)."""
    generator = torch.Generator().manual_seed(seed * 100 + slot)
    word = random.Random(seed).choice(WORDS)
    cache, table, covered, turns = KVCache(POLICY, 1), [0], 0, []
    pending: list[int] = []
    for index, prompt in enumerate(([1, word, 2], [3, 4])):
        new = pending + prompt
        ids: list[int] = []
        logprobs: list[float] = []
        routes: list[torch.Tensor] = []
        forwarded: list[Span] = []
        for draw in range(2):
            version = spans[index * 2 + draw]
            recorder: list[torch.Tensor] = []
            hidden = models[version].forward_cached(
                torch.tensor(new), [len(new)], [covered], [table], cache, recorder=recorder
            )
            forwarded.append(Span(covered, covered + len(new), version))
            covered += len(new)
            chances = torch.softmax(models[version].logits(hidden[-1:]).float(), -1)
            token = torch.multinomial(chances, 1, generator=generator)[0]
            ids.append(int(token))
            logprobs.append(float(models[version].selected_logprobs(hidden[-1:], token)[0]))
            routes.append(torch.stack(recorder, 1))
            new = [int(token)]
        pending = new
        rows = torch.cat(routes).to(torch.uint8)
        turns.append(
            Turn(
                index=index,
                segment=0,
                prompt_ids=Array.of(prompt, "<i4"),
                ids=Array.of(ids, "<i4"),
                logprobs=Array.of(logprobs, "<f4"),
                routed=Array("|u1", tuple(rows.shape), rows.numpy().tobytes()),
                spans=tuple(forwarded),
            )
        )
    return Trajectory(
        run="r",
        lane="train",
        group=group,
        slot=slot,
        attempt=0,
        id=f"{group}-{slot}-0",
        task=TaskRef("even", str(word)),
        family="even",
        seed=seed,
        policy=PolicyRef(),
        sampling=Sampling(),
        outcome="finished",
        turns=tuple(turns),
        diff={},
        fingerprint=NUMERICS.fingerprint,
    )


def score(trajectory: Trajectory) -> Score:
    said = [token for turn in trajectory.turns for token in turn.ids.tolist()]
    return Score(
        run="r",
        lane="train",
        group=trajectory.group,
        slot=trajectory.slot,
        attempt=0,
        trajectory_seq=0,
        task=trajectory.task,
        family="even",
        judge_version="j",
        verdict="passed",
        reward=sum(token % 2 == 0 for token in said) / len(said),
        passed=all(token % 2 == 0 for token in said),
    )


Records = tuple[StepManifest, dict[int, Trajectory], dict[int, Score]]


def batch(models: Mapping[int, Model], version: int, versions: Sequence[int], config: Config = CONFIG) -> Records:
    """A whole batch for `version`, its four forwards per episode made by `versions`."""
    trajectories: dict[int, Trajectory] = {}
    groups = []
    size = config.curriculum.group_size
    for number in range(config.curriculum.groups_per_step):
        name = f"g{version}x{number}"
        slots = []
        for slot in range(size):
            seq = number * size + slot + 1
            trajectories[seq] = episode(models, name, slot, version * 10 + number, versions)
            slots.append((seq, 1000 + seq))
        groups.append(BatchGroup(group=name, close_seq=number + 1, slots=tuple(slots)))
    manifest = StepManifest(
        run="r",
        step=version,
        version=version,
        base_hash="",
        groups=tuple(groups),
        seed=version,
        code="test",
        fingerprint=NUMERICS.fingerprint,
    )
    return manifest, trajectories, {1000 + seq: score(made) for seq, made in trajectories.items()}
