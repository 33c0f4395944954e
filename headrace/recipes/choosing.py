"""Chooses the keys of a run, each with its reason.

Published recipes for coding agents agree on the objective: 16 groups of 8 attempts a step, a rate of 1e-6, ratios from
0.8 to 1.28, no KL term, temperature 1. The rest follows from the model, the suite and the measured plan.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.config import Config, Processes, checkpoints
from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.layout import hugging_face
from headrace.policy.layout.sizes import MOMENTS, POSITION, file_bytes
from headrace.recipes import hardware
from headrace.recipes.wanted import InitError, Wanted
from headrace.registry import PluginError
from headrace.rendering.base import RendererError
from headrace.rendering.bundle import checkpoint_bundle
from headrace.tasks import UnknownSuite, certificates, open_suite
from headrace.tasks.base import Suite, both_sides, trust_of
from headrace.training.memory_plan import GIB, Layout

Scalar = str | int | float | bool
GROUPS, GROUP = 16, 8
STEPS = 100
MICRO = 16_384
"""Tokens of a micro-batch: fewer leave a GPU idle, and a longer sequence is a micro-batch of its own."""
BESIDE_S = 300.0
"""Seconds of an episode for tests, in addition to the policy's turns."""
ADAPTER_RATE = 1e-5
"""Adapters begin at zero and take ten times the rate."""
RECORDS = 200 * 10**9
"""Bytes of records that are kept for replay."""
LARGE = 100 * 10**9
"""Bytes of a checkpoint of which only the newest is kept."""


class Value(NamedTuple):
    """One key of the file."""

    key: str
    value: Scalar | tuple[Scalar, ...] | tuple[tuple[str, ...], ...]
    reason: str


def choose(wanted: Wanted, given: Mapping[str, object]) -> list[Value]:
    """The keys of the run, in the order of the file. given: values of keys that the user sets. InitError."""
    folder = Path(wanted.model)
    try:
        policy = hugging_face.read(folder)
        bundle = checkpoint_bundle(folder)
    except (CheckpointError, RendererError, PluginError, ValueError, OSError) as error:
        raise InitError(f"--model: {folder}: {error}") from None
    try:
        suite = open_suite(wanted.suite, wanted.tasks_dir)
        needs = list(_suite(wanted, suite))
    except (UnknownSuite, PluginError) as error:
        raise InitError(f"--tasks: {error}") from None
    context = wanted.context or min(checkpoints.CONTEXT, policy.max_positions)
    if not 1024 <= context <= policy.max_positions:
        raise InitError(
            f"--context {context}: expected 1,024 to {policy.max_positions:,}, the positions of {folder.name}"
        )
    turn = min(checkpoints.TURN, context // 8)
    base = Layout(
        tokens=min(MICRO, context),
        longest=context,
        learning_rate=float(str(given.get("algorithm.learning_rate", checkpoints.RATE))),
        exact=wanted.gpus * wanted.nodes == 1 and not policy.source,
        versions=int(str(given.get("curriculum.staleness", Config().curriculum.staleness))),
    )
    divided = hardware.divide(wanted, policy, base)
    return [
        Value("policy.checkpoint", wanted.model, f"{policy.max_positions:,} positions, calls in {bundle.renderer}"),
        *([Value("policy.provider", "transformers", "the native one lacks this type")] if policy.source else ()),
        *_engine(wanted, policy, divided, context),
        *needs,
        Value("limits.max_turns", 50, "of published agents"),
        Value("limits.max_turn_tokens", turn, "an eighth of the context at most"),
        Value("limits.max_tokens", context // 2, "sampled tokens: the other half is read"),
        Value("limits.context_tokens", context, "--context" if wanted.context else "of what the model has"),
        Value("limits.reserve_tokens", 2 * turn + 1, "a turn and its summary still end inside the context"),
        Value("curriculum.steps", STEPS, "`headrace estimate` says how long they take"),
        Value("curriculum.groups_per_step", GROUPS, "published recipes: 16 groups of 8 attempts"),
        Value("curriculum.replace_flat", GROUPS, "groups that all pass or all fail teach nothing"),
        Value(
            "algorithm.learning_rate",
            ADAPTER_RATE if divided.rank else checkpoints.RATE,
            "of adapters" if divided.rank else "of published recipes for whole models",
        ),
        Value("algorithm.weighting", "clipped", "published recipes: the ratio to the sampler's probability is clipped"),
        Value("algorithm.ratio_high", 1.28, "clip-higher (DAPO); ratio_low stays 0.8"),
        *_trainer(divided),
        *_kept(wanted, policy, divided, context),
        Value("production.enabled", False, "no users during training"),
        Value("evaluation.heldout_tasks", 0, "name a suite of other tasks in tasks.heldout to measure on it"),
        Value("evaluation.unseen_tasks", 0, "as heldout_tasks"),
    ]


def given_by(entries: Sequence[str]) -> list[Value]:
    """The keys of ``section.key=value`` entries. InitError."""
    out = []
    for entry in entries:
        key, _, text = entry.partition("=")
        try:
            read = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            read = text
        if "." not in key or isinstance(read, dict):
            raise InitError(f"--set: expected section.key=value, got {entry!r}")
        out.append(Value(key.strip(), tuple(read) if isinstance(read, list) else read, "--set"))
    return out


def _engine(wanted: Wanted, policy: PolicyConfig, divided: hardware.Division, context: int) -> Iterator[Value]:
    if not divided.servers:
        bits = "" if policy.source else ", to the bit"
        yield Value("engine.kind", "embedded", f"one GPU: sampler and trainer share it{bits}")
        if policy.source:
            yield Value("engine.exact", False, "the native provider alone has exact mode")
        yield Value("engine.cache_share", hardware.CACHE, "keys and values; the rest is the trainer's")
        yield Value("rollout.credit", 32, "episodes at once")
        return
    weights = file_bytes(policy) / GIB
    yield Value("engine.kind", "sglang", "more than one GPU")
    yield Value("engine.exact", False, "the embedded engine alone has exact mode")
    yield Value("engine.options.python", wanted.python, "SGLang's environment (docs/sglang.md)")
    yield Value(
        "engine.options.servers", len(divided.servers), f"of {divided.split} GPUs: {weights:.1f} GiB of weights each"
    )
    yield Value("engine.options.server_devices", divided.servers, "the GPUs that the trainer leaves")
    split = ("--tp-size", str(divided.split), "--context-length", str(context))
    yield Value("engine.options.args", split, "one copy of the weights takes at most half of its GPUs")
    yield Value("engine.max_batch", 64 * len(divided.servers), "requests at once, over all servers")
    yield Value("numerics.limit_k3", 0.05, "nats a token: above it, sampler and trainer compute other models")
    yield Value("rollout.credit", min(GROUPS * GROUP, 64 * len(divided.servers)), "episodes at once")


def _suite(wanted: Wanted, suite: Suite) -> Iterator[Value]:
    """The keys that the suite's tasks decide: certificates, machines, seconds."""
    ids = certificates.sample_of(suite)
    pairs = [both_sides(suite, id) for id in ids[:200]]
    yield Value("tasks.suite", wanted.suite, f"{len(suite.ids()):,} tasks")
    if wanted.tasks_dir != Config().tasks.dir:
        yield Value("tasks.dir", wanted.tasks_dir, "folder of suites")
    if trust_of(suite) == "log":
        yield Value("tasks.at_risk", True, "only printed lines decide this suite's verdicts (docs/verdicts.md)")
    if certificates.refusal(suite, wanted.tasks_dir, uncertified=False, at_risk=True):
        yield Value("tasks.certify", True, "the suite has no certificates: its tests are examined before use")
        groups = (*Processes().groups[:1], ("certifier",), *Processes().groups[1:])
        yield Value("processes.groups", tuple(groups), "with the certifier")
    images = {task.image for task, _ in pairs if task.image}
    memory = max((task.sandbox_limits.memory_mib for task, _ in pairs), default=0)
    if images:
        yield Value("environment.memory_mb", max(2048, memory), f"machines of images ({len(images)} seen)")
    yield Value("environment.max_vms", 64, "sandboxes at once: lower it where processors or memory are few")
    yield Value("environment.judge_share", 8, "of them for tests")
    limit = max((task.sandbox_limits.time_s for task, _ in pairs), default=0.0)
    tests = max((task.tests.timeout_s for task, _ in pairs), default=0.0)
    if limit:
        return  # a task's own limit replaces [limits] wall_s
    yield Value("limits.wall_s", 1800.0 + max(BESIDE_S, tests), "half an hour of turns, and the longest tests")


def _trainer(divided: hardware.Division) -> Iterator[Value]:
    layout, total = divided.layout, divided.memory.total / GIB
    moments = next(name for name, size in MOMENTS.items() if size == layout.moment_bytes)
    yield Value("trainer.device", "cuda", f"{total:.1f} GiB of each GPU by `headrace trainer plan`")
    yield Value("trainer.micro_tokens", layout.tokens, "one backward pass")
    yield Value("trainer.mesh.shard", divided.trainer, "GPUs that train")
    if layout.context > 1:
        yield Value("trainer.mesh.context", layout.context, "the longest sequence's activations do not fit fewer GPUs")
    if divided.rank:
        yield Value("trainer.lora.rank", divided.rank, "adapters: one GPU has no memory for all moments")
    if layout.recompute:
        yield Value("numerics.recompute", True, "activations do not fit")
    if moments != "float32":
        yield Value("algorithm.moments", moments, "float32 moments do not fit")
    if layout.offload:
        host = divided.memory.host.total * divided.trainer / GIB
        yield Value("trainer.offload", "optimizer", f"{host:.0f} GiB of the host's memory")


def _kept(wanted: Wanted, policy: PolicyConfig, divided: hardware.Division, context: int) -> Iterator[Value]:
    """The keys that bound the disk."""
    routes = policy.sparse_layers * policy.top_k if policy.experts else 0
    step = GROUPS * GROUP * context * (POSITION + 2 * routes)
    large = not divided.rank and 16 * file_bytes(policy) / 2 > LARGE
    every = Config().trainer.checkpoint_every
    count = min(every - 1 if large else 50, max(4, RECORDS // step))
    why = "; more keep a further checkpoint" if large else ""
    yield Value("replay.keep_steps", int(count), f"{count * step / 10**9:.0f} GB of records at most{why}")
    yield Value("weights.collect_chains", 2, "full snapshots of earlier versions go")
    if wanted.nodes == 1 and wanted.gpus > 1:
        size = file_bytes(policy) / GIB
        yield Value("weights.memory_dir", "/dev/shm", f"trainer, sender and servers share one file of {size:.0f} GiB")
        yield Value("weights.shards", 16, "parts that as many threads encode")
    if wanted.nodes > 1:
        yield Value("weights.full_snapshots_url", "/mnt/headrace/weights", "a folder that both nodes see")
        yield Value("run.id", "first", "the nodes find each other by it")
        yield Value("bus.url", "nats://10.0.0.1:4222", "of the trainer's node; its units start it there")
        yield Value("bus.credentials", "/etc/headrace/credentials", "of headrace.bus.broker.credentials, on both nodes")
