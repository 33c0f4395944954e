"""Opens a trainer on several processes: in the first one, and in each of the others."""

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.config import Config
from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.device import select
from headrace.policy.layout import hugging_face
from headrace.policy.numerics_probe import probe
from headrace.training import checkpoint
from headrace.training.device import TrainerError, check_device, device_named
from headrace.training.figures.memory import without_policy
from headrace.training.mid_training import Progress, Trace
from headrace.training.parallel import group, sharding
from headrace.training.parallel.group import ProcessGroup
from headrace.training.parallel.interface import GivenUp, Others
from headrace.training.parallel.nodes import ranks
from headrace.training.parallel.nodes.silence import Silence
from headrace.training.parallel.state import ShardedState
from headrace.training.parallel.trainer import ShardedTrainer
from headrace.training.schedule import optimizer_settings
from headrace.training.trainer import PolicyTrainer


def joined(
    config: Config,
    folder: Path,
    rank: int,
    store: Any = None,
    begin: Path | None = None,
    silence: Silence | None = None,
) -> ShardedTrainer:
    """Join the group of a run's trainer and take this process's rows of the checkpoint. All processes call it; folder:
    of node 0, which alone reads it. begin: in the first process, the source of version 0 where there is no checkpoint
    yet (`ShardedTrainer.begin`). silence: in the first process, gets its progress."""
    without_policy()
    torch.set_num_threads(config.trainer.threads)
    section = config.trainer
    device = ranks.device_of(device_named(section.device), rank % (section.ranks // section.nodes))
    select(device)
    group.join(device, rank, section.ranks, store)
    world = ProcessGroup(device, section.expert_ranks, section.context_ranks, section.nodes)
    if silence is not None:
        world.watched(silence.mark)
    policy = hugging_face.from_section(config.policy)
    numerics = probe(policy, exact=config.engine.exact, device=device)
    marks = world.gathered(numerics.fingerprint)
    if len(set(marks)) > 1:
        raise TrainerError(f"the ranks of a trainer need one numerics fingerprint, got {', '.join(sorted(set(marks)))}")
    _check_memory(config, policy, world)
    sharded = sharding.build(policy, numerics, world, offload=section.offload == "optimizer")
    settings = optimizer_settings(config.algorithm)
    trainer = ShardedTrainer(config, folder, ShardedState(sharded, world, settings=settings), numerics)
    if source := world.gathered(begin)[0]:
        trainer.begin(source)
    else:
        trainer.load(folder / "checkpoint.safetensors")
    return trainer


def _check_memory(config: Config, policy: PolicyConfig, world: ProcessGroup) -> None:
    """TrainerError in every process, with the first rank whose device has less memory than the plan: ranks may have
    unequal devices, and those of other nodes are seen by nobody else."""
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # the first process may have made version 0 here
    why = ""
    try:
        check_device(config, policy, world.device)
    except TrainerError as error:
        why = f"rank {world.rank}: {error}"
    if refused := [text for text in world.gathered(why) if text]:
        raise TrainerError(refused[0])


def _check(config: Config, policy: PolicyConfig) -> None:
    """TrainerError for what several ranks cannot do."""
    settings = config.trainer
    per_node = settings.ranks // settings.nodes
    if settings.expert_ranks > 1 and (not policy.experts or policy.experts % per_node):
        where = "" if settings.nodes == 1 else " of a node"
        raise TrainerError(
            f"[trainer] expert_ranks: expected experts that {per_node} ranks{where} can share evenly, the policy has "
            f"{policy.experts}; set expert_ranks = 1 or another number of ranks"
        )
    if policy.kv_heads % settings.context_ranks:
        raise TrainerError(
            f"[trainer] context_ranks: expected a divisor of the policy's {policy.kv_heads} key-value heads, got "
            f"{settings.context_ranks}"
        )
    rounded = config.weights.precision == "bf16" and policy.dtype == "float32"
    if settings.frozen or rounded:
        key = "[trainer] frozen" if settings.frozen else '[weights] precision = "bf16" of a float32 policy'
        raise TrainerError(
            f"[trainer] ranks: expected 1 with {key}, got {settings.ranks}; several ranks cannot do that yet"
        )


def _imported(config: Config, base: Path | None) -> Path | None:
    """The checkpoint folder or the snapshot file whose weights are version 0; None for a new policy and for one with
    mid-training, which one process makes."""
    if base is not None or config.mid_training.tokens or not config.policy.checkpoint:
        return base
    return Path(config.policy.checkpoint)


def _alone(
    config: Config,
    folder: Path,
    *,
    tokenizer_json: str,
    traces: Callable[[], Iterable[Trace]],
    progress: Callable[[Progress], None],
) -> None:
    """Make version 0 in this process, and write it as a checkpoint. TrainerError, MidTrainingFailed."""
    settings = config.trainer
    tokens = -(-settings.micro_tokens // settings.context_ranks)  # for its memory plan: it takes no step
    # One device may not hold all weights, and making a new policy without mid-training computes nothing on it.
    place = settings.device if config.mid_training.tokens else "cpu"
    alone = msgspec.structs.replace(
        settings, ranks=1, nodes=1, expert_ranks=1, context_ranks=1, context_runs=0, micro_tokens=tokens, device=place
    )
    shorter = msgspec.structs.replace(config.limits, context_tokens=tokens, reserve_tokens=1)
    users = msgspec.structs.replace(config.production, context_tokens=tokens, limits=shorter)
    first = msgspec.structs.replace(config, trainer=alone, limits=shorter, production=users)
    try:
        PolicyTrainer.prepare_files(first, folder, tokenizer_json=tokenizer_json)
    except TrainerError as error:
        what = "mid-training does not run" if config.mid_training.tokens else "a new policy is not made"
        raise TrainerError(
            f"{what} over several ranks, but in the first one alone: {error}. Make the policy on a machine that holds "
            "it (`headrace policy train`), and give its folder as [policy] checkpoint with [mid_training] tokens = 0: "
            "every rank then reads its own rows"
        ) from None
    PolicyTrainer.prepare(first, folder, tokenizer_json=tokenizer_json, traces=traces, progress=progress)
    gc.collect()


def open_ranks(
    config: Config,
    folder: Path,
    *,
    tokenizer_json: str,
    traces: Callable[[], Iterable[Trace]],
    progress: Callable[[Progress], None] = lambda _: None,
    base: Path | None = None,
    waiting: Callable[[str], None] = lambda _: None,
    started: Callable[[Others], None] = lambda _: None,
) -> ShardedTrainer:
    """As `PolicyTrainer.prepare`, in the first of `[trainer] ranks` processes; starts the others of its machine and
    waits for those of other nodes. GroupError when one ends. waiting: called often while it waits, with a text about
    the missing nodes; it may raise. started: gets the others before they join."""
    resumed = (folder / "checkpoint.safetensors").exists()
    _check(config, hugging_face.of_run(config))
    PolicyTrainer.prepare_files(config, folder, tokenizer_json=tokenizer_json)
    settings = config.trainer
    device = device_named(settings.device)
    per_node = settings.ranks // settings.nodes
    if device.type == "cuda" and torch.cuda.device_count() < per_node:
        raise TrainerError(f"[trainer] ranks: {per_node} need as many CUDA devices, got {torch.cuda.device_count()}")
    begin = None if resumed else _imported(config, base)
    if not resumed and begin is None:
        _alone(config, folder, tokenizer_json=tokenizer_json, traces=traces, progress=progress)
    others = ranks.Ranks(config, folder)
    started(others)
    try:
        others.wait(waiting)
        with others.silence.order("the opening of its ranks"):
            trainer = joined(config, folder, 0, others.store, begin, others.silence)
    except (TrainerError, CheckpointError, checkpoint.CheckpointError):
        others.end()
        raise
    except GivenUp:
        others.end()
        raise
    except Exception as error:
        explained = others.explained(error)
        others.end()
        raise explained from error
    trainer.lead(others, resumed=resumed)
    return trainer
