"""Opens a trainer on several processes: in the first one, and in each of the others."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from headrace.config import Config
from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.device import select
from headrace.policy.layout import hugging_face
from headrace.policy.numerics_probe import probe
from headrace.rendering.base import RendererError
from headrace.training import checkpoint
from headrace.training.data.base import DataError
from headrace.training.device import TrainerError, check_device, check_exact, device_named, planned
from headrace.training.figures.layout import divided
from headrace.training.figures.memory import without_policy
from headrace.training.memory_plan import MemoryPlan
from headrace.training.mid_training import FILE, MidTrainingFailed, Progress, Trace
from headrace.training.parallel import group, sharding
from headrace.training.parallel.group import ProcessGroup
from headrace.training.parallel.interface import GivenUp, Others
from headrace.training.parallel.mid_training import ranks as mid_training
from headrace.training.parallel.nodes import ranks
from headrace.training.parallel.state import ShardedState
from headrace.training.parallel.trainer import ShardedTrainer
from headrace.training.schedule import optimizer_settings
from headrace.training.trainer import PolicyTrainer


class Beginning(NamedTuple):
    """How version 0 is made, as the first process tells the others."""

    source: str = ""
    """A checkpoint folder or a snapshot file; empty: random weights."""
    learns: bool = False
    """Whether mid-training follows."""


def joined(
    config: Config,
    folder: Path,
    rank: int,
    store: PrefixStore,
    begin: Beginning | None = None,
    learn: Callable[[ShardedTrainer, Path | None], None] = mid_training.follow,
) -> ShardedTrainer:
    """Join the group of a run's trainer and take this process's rows of the checkpoint. All processes call it; folder:
    of node 0, which alone reads it. In the first process, begin: how version 0 is made where there is no checkpoint
    yet; learn: mid-trains from a source, as `mid_training.lead`. Raises as `learn`, TrainerError, CheckpointError."""
    without_policy()
    torch.set_num_threads(config.trainer.threads)
    section = config.trainer
    device = ranks.device_of(device_named(section.device), rank % section.machine_ranks)
    select(device)
    policy = hugging_face.of_run(config)
    # The first process measures before it joins: none can while it is in a group, and all have the same plan.
    phases = [config, *([_learning(config)] if begin is not None and begin.learns else [])] if rank == 0 else []
    plans = [planned(phase, policy, device) for phase in phases]
    limit = timedelta(seconds=section.stall_s)
    group.join(device, rank, section.ranks, store, limit)
    world = ProcessGroup(device, section.mesh, section.node_ranks, limit)
    numerics = probe(policy, exact=config.engine.exact, device=device)
    marks = world.gathered(numerics.fingerprint, str)
    if len(set(marks)) > 1:
        raise TrainerError(f"the ranks of a trainer need one numerics fingerprint, got {', '.join(sorted(set(marks)))}")
    check_exact(config, numerics)
    told = world.gathered((begin,) if begin is not None else (), tuple[Beginning, ...])[0]
    first = told[0] if told else None
    plans = world.gathered(plans, list[MemoryPlan])[0]
    for phase, needed in zip((config, _learning(config)), plans, strict=False):
        _check_memory(phase, needed, world)
    sharded = sharding.build(policy, numerics, world, offload=section.offload == "optimizer", frozen=section.frozen)
    settings = optimizer_settings(config.algorithm)
    trainer = ShardedTrainer(config, folder, ShardedState(sharded, world, settings=settings), numerics)
    trainer.planned_bytes = plans[0].total
    if first is None:
        trainer.load(folder / "checkpoint.safetensors")
        return trainer
    source = Path(first.source) if first.source else None
    if first.learns:
        learn(trainer, source)
    else:
        trainer.fill(source)
    trainer.begin()
    return trainer


def _learning(config: Config) -> Config:
    """The configuration whose memory plan is that of mid-training: micro-batches as large as its longest sequence, and
    ordinary mode, in which attention keeps more."""
    recipe = config.mid_training
    longest = max([recipe.sequence, *(phase.sequence for phase in recipe.phases)]) if recipe.data else 0
    tokens = max(config.trainer.micro_tokens, longest)
    return msgspec.structs.replace(
        config,
        trainer=msgspec.structs.replace(config.trainer, micro_tokens=tokens),
        engine=msgspec.structs.replace(config.engine, exact=False),
    )


def _check_memory(config: Config, needed: MemoryPlan, world: ProcessGroup) -> None:
    """TrainerError in every process, with the first rank whose device has less memory than the plan: ranks may have
    unequal devices, and those of other nodes are seen by nobody else."""
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    why = ""
    try:
        check_device(config, needed, world.device)
    except TrainerError as error:
        why = f"rank {world.rank}: {error}"
    if refused := [text for text in world.gathered(why, str) if text]:
        raise TrainerError(refused[0])


def _check(config: Config, policy: PolicyConfig) -> None:
    """TrainerError for what several ranks cannot do."""
    settings = config.trainer
    mesh = settings.mesh
    if mesh.expert > 1 and not divided(policy, mesh.shard, mesh.expert):
        raise TrainerError(
            f"[trainer] mesh.expert: expected experts that {mesh.expert} owners can share evenly, the policy has "
            f"{policy.experts}; set mesh.expert = 1 or another one"
        )
    if policy.kv_heads % mesh.context:
        raise TrainerError(
            f"[trainer] mesh.context: expected a divisor of the policy's {policy.kv_heads} key-value heads, got "
            f"{mesh.context}"
        )
    if config.weights.precision == "bf16" and policy.dtype == "float32":
        raise TrainerError(
            '[trainer] mesh: expected one process with [weights] precision = "bf16" of a float32 policy, got '
            f"{settings.ranks}; several cannot do that yet"
        )
    if mesh.expert > 1 and (settings.frozen or policy.adapter):
        raise TrainerError(
            "[trainer] mesh.expert: expected 1 with frozen parameters or adapters, whose experts are no "
            f"owners' to train; got {mesh.expert}"
        )


def _beginning(config: Config, base: Path | None) -> Beginning:
    """The making of version 0. base: a snapshot file with its bytes, which are not mid-trained."""
    if base is not None:
        return Beginning(str(base))
    return Beginning(config.policy.checkpoint, config.mid_training.tokens > 0)


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
    """As `PolicyTrainer.prepare`, in the first of several processes; starts the others of its machine and
    waits for those of other nodes. GroupError when one ends. waiting: called often while it waits, with a text about
    the missing nodes; it may raise. started: gets the others before they join."""
    resumed = (folder / "checkpoint.safetensors").exists()
    _check(config, hugging_face.of_run(config))
    PolicyTrainer.prepare_files(config, folder, tokenizer_json=tokenizer_json)
    settings = config.trainer
    device = device_named(settings.device)
    here = settings.machine_ranks
    if device.type == "cuda" and torch.cuda.device_count() < here:
        got = torch.cuda.device_count()
        raise TrainerError(f"[trainer] mesh: {here} processes of a node need a CUDA device each, it has {got}")
    begin = None if resumed else _beginning(config, base)
    others = ranks.Ranks(config, folder)
    started(others)

    def learn(trainer: ShardedTrainer, source: Path | None) -> None:
        mid_training.lead(trainer, source, traces(), progress)

    try:
        others.wait(waiting)
        trainer = joined(config, folder, 0, others.store, begin, learn)
    except (TrainerError, CheckpointError, checkpoint.UnusableCheckpoint, MidTrainingFailed, DataError, RendererError):
        others.end()
        raise
    except GivenUp:
        others.end()
        raise
    except Exception as error:
        explained = others.explained(error, "the opening of its ranks")
        others.end()
        raise explained from error
    (folder / FILE).unlink(missing_ok=True)
    trainer.lead(others, resumed=resumed)
    return trainer
