"""Rules between keys: each value is allowed alone, but not together with another one.

Each rule names the key to change and gives the reason in one clause. The rules are checked in this order when a
configuration is read, and the first one that fails is the error.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

from headrace.config.harnesses import HARNESSES
from headrace.config.nodes import LEAST_MEMORY_MIB
from headrace.config.tree import Config
from headrace.registry import SEAMS

Problem = tuple[str, str]
"""Dotted key, and what is wrong with its value."""
CLIENTS = "client"
"""The suite whose attempts are clients' sessions (`messages.product.CLIENT_SUITE`)."""
_MOST_BETA = 0.99
"""bfloat16 resolves 2^-8 to 2^-7 of a number: a moment that decays by less than half of that stays as it is. Levels of
eight bits are as far apart at best."""


def problems(config: Config) -> Iterator[Problem]:
    """Each rule that the configuration breaks."""
    for rule in RULES:
        yield from rule(config)


def _plugins(config: Config) -> Iterator[Problem]:
    for seam, names in config.run.plugins.items():
        if seam not in SEAMS:
            yield "run.plugins", f"expected keys among {', '.join(SEAMS)}, got {seam!r}"
        elif wrong := next((name for name in names if ":" not in name), ""):
            yield f"run.plugins.{seam}", f"expected module:attribute, got {wrong!r:.80}"


def _limits(config: Config) -> Iterator[Problem]:
    section = config.limits
    if section.max_turn_tokens > section.max_tokens:
        yield (
            "limits.max_turn_tokens",
            f"expected at most limits.max_tokens ({section.max_tokens}), got {section.max_turn_tokens}",
        )
    if section.max_turn_tokens >= section.context_tokens:
        yield (
            "limits.max_turn_tokens",
            f"expected less than limits.context_tokens ({section.context_tokens}), got {section.max_turn_tokens}",
        )
    if section.reserve_tokens >= section.context_tokens:
        yield (
            "limits.reserve_tokens",
            f"expected less than limits.context_tokens ({section.context_tokens}), got {section.reserve_tokens}",
        )
    if 0 < section.reserve_tokens <= 2 * section.max_turn_tokens:
        yield (
            "limits.reserve_tokens",
            f"expected 0, or more than {2 * section.max_turn_tokens}: a turn that begins below the limit and the "
            f"summary may each have limits.max_turn_tokens ({section.max_turn_tokens}); got {section.reserve_tokens}",
        )


def _curriculum(config: Config) -> Iterator[Problem]:
    section = config.curriculum
    if section.replace_flat and config.algorithm.baseline != "group":
        yield (
            "curriculum.replace_flat",
            "expected 0 with algorithm.baseline = class: there, a group with equal rewards can have advantages",
        )
    slots = section.group_size * section.groups_per_step
    if config.algorithm.minibatches > slots:
        yield (
            "algorithm.minibatches",
            f"expected at most the {slots} trajectories of a batch, got {config.algorithm.minibatches}",
        )


def _harness(config: Config) -> Iterator[Problem]:
    known = ("own", *HARNESSES, *config.harnesses)
    for name in config.harness.mix or (config.harness.name,):
        if name not in known:
            yield (
                "harness.mix" if config.harness.mix else "harness.name",
                (f"expected one of {', '.join(known)}, got {name!r}; others stand in a table [harnesses.{name}]"),
            )
    for name, program in config.harnesses.items():
        if program.install.partition(":")[0] not in ("pip", "npm", "folder"):
            yield f"harnesses.{name}.install", f"expected pip:, npm: or folder:, got {program.install!r:.80}"
        if not program.command:
            yield f"harnesses.{name}.command", "expected a program of its bundle and its arguments, got none"


def _mcp(config: Config) -> Iterator[Problem]:
    for name, server in config.tasks.mcp.items():
        if bool(server.command) == bool(server.url):
            yield f"tasks.mcp.{name}", "expected either command or url"
        elif server.key_file and not server.url:
            yield (
                f"tasks.mcp.{name}.key_file",
                "expected none with command; env names the variables that a command gets",
            )
        elif server.env and not server.command:
            yield f"tasks.mcp.{name}.env", "expected none with url; key_file names the file with the token"


def _judge(config: Config) -> Iterator[Problem]:
    section = config.judge
    if section.rubric and not section.model_url:
        yield "judge.model_url", "expected the address of the endpoint that judges judge.rubric, got none"
    if section.model_url and not section.model:
        yield "judge.model", "expected the name of a model at judge.model_url, got none"
    if section.model_folder and not section.model_url:
        yield "judge.model_folder", "expected none without judge.model_url: it pins the model of that endpoint"
    if section.rubric_weight and config.algorithm.reward != "shaped":
        reward = config.algorithm.reward
        yield "judge.rubric_weight", f"expected 0: the reward {reward!r} decides itself what a rubric is worth"


def _betas(config: Config, where: str) -> Iterator[Problem]:
    """where: the section whose decays are checked."""
    section, moments = getattr(config, where), config.algorithm.moments
    if moments != "float32" and section.beta2 > _MOST_BETA:
        yield (
            f"{where}.beta2",
            f"expected at most {_MOST_BETA} with algorithm.moments = {moments}, whose rounding keeps a "
            f"moment from decaying more slowly; got {section.beta2}",
        )


def _algorithm(config: Config) -> Iterator[Problem]:
    section = config.algorithm
    yield from _betas(config, "algorithm")
    if not section.ratio_low <= 1.0 <= section.ratio_high:
        yield (
            "algorithm.ratio_low",
            f"expected ratio_low <= 1 <= ratio_high, got {section.ratio_low} and {section.ratio_high}",
        )
    if section.dual_clip and section.weighting in ("truncated", "masked", "sequence_masked"):
        yield (
            "algorithm.dual_clip",
            f"expected 0 with weighting = {section.weighting!r}, whose ratios tis_clip bounds, got {section.dual_clip}",
        )
    if section.dual_clip and section.dual_clip <= section.ratio_high:
        yield (
            "algorithm.dual_clip",
            f"expected 0 or more than ratio_high ({section.ratio_high}), got {section.dual_clip}",
        )
    if section.weighting == "masked" and section.tis_clip < 1.0:
        yield "algorithm.tis_clip", f"expected at least 1 with weighting = 'masked', got {section.tis_clip}"


def _feedback(config: Config) -> Iterator[Problem]:
    if config.feedback.enabled and not config.production.enabled:
        yield "feedback.enabled", "expected false without the product lane ([production] enabled), got true"
    if config.tasks.suite == CLIENTS:
        if not config.production.enabled:
            yield "tasks.suite", "expected [production] enabled with 'client': the sessions come through the gateway"
        if config.feedback.enabled:
            yield "feedback.enabled", "expected false with [tasks] suite = 'client': the run itself trains on sessions"
    shares = config.gate.canary
    if list(shares) != sorted(set(shares)) or 0.0 in shares or 1.0 in shares:
        yield "gate.canary", f"expected shares that rise between 0 and 1, both excluded, got {list(shares)}"


def _policy(config: Config) -> Iterator[Problem]:
    section = config.policy
    if section.checkpoint:
        return  # the checkpoint determines the shape
    if section.heads % section.kv_heads:
        yield "policy.kv_heads", f"expected a divisor of heads ({section.heads}), got {section.kv_heads}"
    if section.top_k > section.experts:
        yield "policy.top_k", f"expected at most experts ({section.experts}), got {section.top_k}"
    if section.head_dim % 2:
        yield "policy.head_dim", f"expected an even number (rotary embedding), got {section.head_dim}"


def _trainer(config: Config) -> Iterator[Problem]:
    section = config.trainer
    mesh, each = section.mesh, section.machine_ranks
    if section.ranks % each:
        yield "trainer.node_ranks", f"expected a divisor of the mesh's {section.ranks} processes, got {each}"
    elif (each < mesh.shard and mesh.shard % each) or (each > mesh.shard and each % mesh.shard):
        yield (
            "trainer.node_ranks",
            f"expected a divisor or a multiple of trainer.mesh.shard ({mesh.shard}), so that whole nodes hold a copy "
            f"or a node whole copies; got {each}",
        )
    if section.nodes > 1 and not section.rendezvous:
        yield (
            "trainer.rendezvous",
            f"expected HOST:PORT of the trainer's machine with {section.nodes} nodes, got none",
        )
    for key, count in (("expert", mesh.expert), ("context", mesh.context)):
        if mesh.shard % count:
            yield f"trainer.mesh.{key}", f"expected a divisor of trainer.mesh.shard ({mesh.shard}), got {count}"
    if section.offload != "none" and mesh.expert > 1:
        yield (
            "trainer.offload",
            f"expected none with trainer.mesh.expert = {mesh.expert}, where experts are no shards of FSDP; "
            f"got {section.offload!r}",
        )
    if section.ranks > 1 and ":" in section.device:
        yield (
            "trainer.device",
            f"expected auto, cpu or cuda with a mesh of {section.ranks} processes, got {section.device!r}",
        )


def _mid_training(config: Config) -> Iterator[Problem]:
    for number, source in enumerate(config.mid_training.data):
        where = f"mid_training.data[{number}].path"
        if source.kind == "generated" and source.path:
            yield where, f"expected none with kind = 'generated', got {source.path!r}"
        elif source.kind != "generated" and not source.path:
            yield where, f"expected a file or folder with kind = {source.kind!r}, got none"
    if config.mid_training.tokens and config.trainer.ranks > 1:  # one process keeps float32 moments there
        yield from _betas(config, "mid_training")
    starts = [phase.start for phase in config.mid_training.phases]
    if starts != sorted(set(starts)):
        yield "mid_training.phases", f"expected values of start that rise, got {starts}"


def _machines(config: Config) -> Iterator[Problem]:
    section = config.environment
    if section.judge_share + section.production_share >= section.max_vms:
        reserved = section.judge_share + section.production_share
        yield (
            "environment.max_vms",
            f"expected more than judge_share + production_share ({reserved}), or training gets no machine, "
            f"got {section.max_vms}",
        )
    if section.warm > section.max_vms:
        yield "environment.warm", f"expected at most max_vms ({section.max_vms}), got {section.warm}"


def _weights(config: Config) -> Iterator[Problem]:
    section = config.weights
    if section.collect_chains == 1:
        yield (
            "weights.collect_chains",
            "expected 0 or at least 2, because a node that joins may still read the previous chain; got 1",
        )


def _processes(config: Config) -> Iterator[Problem]:
    if any(not group for group in config.processes.groups):
        yield "processes.groups", "expected at least one actor in every group, got an empty group"
    named = sorted(name for group in config.processes.groups for name in group if ":" in name)
    for earlier, other in pairwise(named):
        if earlier == other:
            yield "processes.groups", f"expected every name:id once, got {earlier} twice"
            return


def _sandboxes(config: Config) -> Iterator[Problem]:
    memory = config.sandboxes.memory_mib
    if 0 < memory < LEAST_MEMORY_MIB:
        yield "sandboxes.memory_mib", f"expected 0 or at least {LEAST_MEMORY_MIB}, got {memory}"


RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _plugins,
    _limits,
    _curriculum,
    _harness,
    _mcp,
    _judge,
    _algorithm,
    _feedback,
    _policy,
    _trainer,
    _mid_training,
    _machines,
    _weights,
    _processes,
    _sandboxes,
)
