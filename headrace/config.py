"""One typed TOML for a run: a section per room, an attribute per choice.

Unknown keys, wrong types and missing files are refused with the key, what was expected and the line.
"""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

Backend = Literal["auto", "qemu", "process"]


class ConfigError(Exception):
    """The configuration can't be used; the text says which key, what was expected, and the line."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class Run(Section, frozen=True, kw_only=True):
    seed: int = 1
    id: str = ""
    """Empty: made from date, time and seed."""
    dir: str = "runs"
    """Folder of runs; the streams, checkpoints and reports of a run lie in <dir>/<id>."""
    min_free_mb: int = 2048
    """MiB that must be free for a run to start; it is stopped in order when an eighth of that is left."""


class Bus(Section, frozen=True, kw_only=True):
    url: str = ""
    """Empty: `headrace up` starts a nats-server on loopback with nats.conf."""
    port: int = 0
    """Port of the started server; 0 takes a free one."""
    credentials: str = ""
    """Folder of per-role credentials, made per run when headrace starts the server."""
    region: str = "local"
    otlp_endpoint: str = ""
    """OTLP/HTTP collector such as http://127.0.0.1:4318; empty exports nothing."""


class Processes(Section, frozen=True, kw_only=True):
    """Which actors share an operating-system process: one list per process."""

    groups: tuple[tuple[str, ...], ...] = (
        ("curriculum", "evaluator", "dead_letter"),
        ("gateway", "feedback", "scavenger"),
        ("environment",),
        ("judge",),
        ("rollout",),
        ("trainer",),
        ("weight_sender", "weight_receiver"),
    )


class Policy(Section, frozen=True, kw_only=True):
    """The tiny default; a Hugging Face folder in `checkpoint` replaces all of it."""

    checkpoint: str = ""
    dim: int = 96
    layers: int = 2
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 32
    experts: int = 8
    top_k: int = 2
    expert_dim: int = 96
    vocab: int = 640
    dtype: Literal["float32", "bfloat16"] = "float32"
    expert_format: Literal["", "mxfp8"] = ""
    """How experts are served and multiplied; empty is `dtype`. The table is in headrace/kernels/mxfp8.py."""


class Engine(Section, frozen=True, kw_only=True):
    kind: Literal["embedded", "sglang"] = "embedded"
    exact: bool = True
    """Same bits as the trainer's scoring, whatever the batch; refused where the numerics probe finds no way."""
    max_batch: int = 64
    threads: int = 1
    url: str = ""
    """An SGLang server that runs already. One rollout actor per server."""
    python: str = ""
    """Starts a server instead: the interpreter of the environment that has SGLang (docs/sglang.md)."""
    args: tuple[str, ...] = ()
    """Further arguments of the server that is started."""
    swap: Literal["in_place", "abort"] = "in_place"
    """Change weights under running requests, or take them back and send the rest of them again."""
    deadline_s: float = 600.0
    """For one turn on a server."""
    start_s: float = 600.0
    """For a server to come up."""
    stage_dir: str = "/dev/shm"
    """Memory in which the checkpoint lies that a server loads."""


class Environment(Section, frozen=True, kw_only=True):
    backend: Backend = "auto"
    """auto: qemu where it works, else an error that says why. process is not isolated and must be asked for."""
    accel: Literal["auto", "kvm", "tcg"] = "auto"
    """auto: kvm if a machine really boots under it, else tcg."""
    isolation: Literal["episode", "group"] = "group"
    slots_per_vm: int = 8
    memory_mb: int = 224
    max_vms: int = 8
    """Clones alive at once on this node; judge_share of them are kept for the judge."""
    judge_share: int = 2
    production_share: int = 0
    """Machines that only the judge and the production lane may take."""
    warm: int = 1
    """Clones of the light template kept ready and stopped, within max_vms: they take an acquire from 100 ms to 5."""
    also_warm: tuple[str, ...] = ()
    """Further templates (debian, imported images, tasks) of which `warm` clones are kept ready."""
    lease_s: float = 120.0
    group_idle_s: float = 10.0
    cache_dir: str = ".cache/headrace"
    """Guest image and templates, content-addressed; survives runs."""


class Rollout(Section, frozen=True, kw_only=True):
    credit: int = 48
    """Episodes of one lane that a rollout actor runs at once: the engine batches over them."""


class Judge(Section, frozen=True, kw_only=True):
    credit: int = 32
    """Trajectories that a judge works on at once; with group isolation a group's share one clone."""


class Tasks(Section, frozen=True, kw_only=True):
    suite: str = "generated/train"
    heldout: str = "generated/heldout"
    unseen: str = "generated/unseen"
    dir: str = "suites"
    """Where suites made by `headrace tasks from-sdist` lie."""


class Limits(Section, frozen=True, kw_only=True):
    max_turns: int = 6
    max_turn_tokens: int = 48
    max_tokens: int = 256
    context_tokens: int = 512
    wall_s: float = 120.0
    max_parallel_calls: int = 6


class Curriculum(Section, frozen=True, kw_only=True):
    group_size: int = 8
    groups_per_step: int = 8
    """P: groups of a batch."""
    staleness: int = 1
    steps: int = 40
    attempts: int = 3
    on_stale: Literal["wait", "drop"] = "wait"
    temperature: float = 1.0


class Algorithm(Section, frozen=True, kw_only=True):
    objective: Literal["dr_grpo"] = "dr_grpo"
    learning_rate: float = 1e-3
    warmup_steps: int = 2
    tis_clip: float = 2.0
    """Upper bound on p_trainer / p_sampler as a token's weight."""
    weighting: Literal["truncated", "masked", "clipped", "decoupled", "sequence", "sequence_masked"] = "truncated"
    """truncated: weights above the bound become the bound; masked: tokens beyond it or `mask_low` teach nothing;
    the others are in headrace/algorithms/corrections.py, with their papers."""
    mask_low: float = 0.5
    ratio_low: float = 0.8
    ratio_high: float = 1.2
    """The band of clipped, decoupled, sequence and sequence_masked; GSPO's own is 0.9997 to 1.0004."""
    minibatches: int = 1
    """Updates that a batch is split into; decoupled differs from truncated only from the second on."""
    kl_weight: float = 0.0
    grad_clip: float = 1.0
    max_grad_norm: float = 0.0
    """A step whose gradient norm (before clipping) is above this is refused; 0 is no limit."""
    max_k1: float = 0.0
    """A step whose |k1| (sampler against trainer, nats a token) is above this is refused; 0 is no limit."""
    guard_k1: float = 0.0
    """k1 above which a collapse is suspected (headrace/training/guard.py); 0 watches nothing."""
    guard_patience: int = 2
    """Steps in a row above it that mean a rollback when neither reward nor entropy says so at once."""
    guard_reward: float = 0.5
    """A reward below this share of the calm steps' mean agrees with k1."""
    guard_entropy: float = 2.0
    """An entropy off by this factor, up or down, agrees with k1."""
    guard_backoff: float = 0.5
    """Factor on the learning rate with each rollback."""
    length_penalty: float = 0.0
    """Weight of the concave length penalty."""
    length_k: float = 0.01
    length_q: float = 0.5
    constant_tokens: int = 64
    """Dr. GRPO's constant divisor instead of each sequence's length."""


class Numerics(Section, frozen=True, kw_only=True):
    """Differences between sampler and trainer: limits per engine, as in EngineMismatch; 0 is no limit."""

    on_mismatch: Literal["warn", "mask", "stop"] = "warn"
    """Above a limit: say so; let tokens whose ratio is beyond `mask_ratio`, either way up, teach nothing; or refuse."""
    limit_max_abs_dlp: float = 0.0
    limit_k3: float = 0.0
    limit_differ: float = 0.0
    limit_flips: float = 0.0
    mask_ratio: float = 2.0
    replay_plausible: float = 0.0
    """Share of the weakest live choice's score below which a recorded expert is not replayed; 0 replays all."""
    recompute: bool = False
    """Keep no activations inside layers and compute them again in backward: less memory, the same bits."""


class MidTraining(Section, frozen=True, kw_only=True):
    tokens: int = 3_000_000
    batch_tokens: int = 1024
    learning_rate: float = 3e-3
    warmup: float = 0.03
    """Share of the tokens over which the learning rate rises; after it, it falls to a tenth."""
    beta2: float = 0.98
    weight_decay: float = 0.0
    quality: float = 0.35
    """Share of traces without a planted fault."""
    processes: int = 2
    """Processes that share each batch, one torch thread each. Part of the recipe: another number gives other bits."""


class Trainer(Section, frozen=True, kw_only=True):
    threads: int = 1
    rescore: int = 8
    """Trajectories re-scored exactly at every step (Law 5)."""
    checkpoint_every: int = 10
    micro_tokens: int = 8192


class Replay(Section, frozen=True, kw_only=True):
    keep_steps: int = 1000


class Weights(Section, frozen=True, kw_only=True):
    codec: Literal["d8-zstd", "d8-lz4", "d10-zstd"] = "d8-zstd"
    """d10 is a quarter to a half smaller and half as fast: for thin links."""
    anchor_every: int = 32
    """Versions after which an anchor is laid beside the deltas, for late joiners."""
    keep: int = 4
    """Newest versions that a node keeps as files, besides pinned ones; at least staleness + 2."""
    precision: Literal["as_trained", "bf16", "mxfp8"] = "as_trained"
    """What is published: the trainer's bytes, or those rounded once by the sender. Engines serve exactly these."""
    shards: int = 1
    """Parts of a version that are encoded and fetched apart."""
    encoders: int = 1
    """Threads of the sender that encode shards; the bytes do not depend on it."""
    want: tuple[str, ...] = ()
    """Tensors that this node needs, such as model.layers.3.*: it stages their shards alone. Empty: all."""
    fold_every: int = 0
    """Versions that the sender folds into one delta, for who lags; 0 folds nothing."""
    publishers: tuple[str, ...] = ()
    """Public keys (U...) whose versions are taken; empty: weight_publisher.pub of the credentials folder."""
    unsigned: bool = False
    """Take versions that nobody signed."""
    region: str = "local"


class Evaluation(Section, frozen=True, kw_only=True):
    heldout_tasks: int = 200
    unseen_tasks: int = 48
    before: bool = True
    after: bool = True


class Production(Section, frozen=True, kw_only=True):
    """The product lane: its gateway, its own rollout actors, and the scavenger that lends them."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = 0
    """HTTP port of the gateway; 0 takes a free one, written to <run dir>/gateway.json."""
    tenant: str = "default"
    training_allowed: bool = False
    """Opt-in of the tenant: thumbs become scores only with it."""
    rollouts: tuple[str, ...] = ("product",)
    """Ids of the rollout actors that belong to the product and may be lent."""
    reclaim_above: int = 0
    """Sessions running or waiting above this take lent capacity back at once."""
    lend_after_s: float = 3.0
    """Quiet time before capacity is lent."""
    feedback_batch: int = 8
    """Scored thumbs that are worth an evaluation."""
    gate_tasks: int = 0
    """Held-out tasks of the gate before a version is promoted; 0 promotes nothing."""
    simulate: bool = False
    """Run simulated users against the gateway, with a day-and-night rhythm."""
    day_s: float = 40.0
    peak_requests_per_s: float = 0.5


class Config(Section, frozen=True, kw_only=True):
    run: Run = Run()
    bus: Bus = Bus()
    processes: Processes = Processes()
    policy: Policy = Policy()
    engine: Engine = Engine()
    environment: Environment = Environment()
    rollout: Rollout = Rollout()
    judge: Judge = Judge()
    tasks: Tasks = Tasks()
    limits: Limits = Limits()
    curriculum: Curriculum = Curriculum()
    algorithm: Algorithm = Algorithm()
    numerics: Numerics = Numerics()
    mid_training: MidTraining = MidTraining()
    trainer: Trainer = Trainer()
    replay: Replay = Replay()
    weights: Weights = Weights()
    evaluation: Evaluation = Evaluation()
    production: Production = Production()


def _line_of(text: str, path: str) -> int:
    """The line on which a dotted key is written, 0 when it can't be told."""
    *sections, key = re.sub(r"\[\.\.\.\]|\[\d+\]", "", path).split(".")
    wanted, current = ".".join(sections), ""
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[([^\[\]]+)\]", line)
        if header:
            current = header.group(1).strip()
            if not wanted and current == key:
                return number
        elif current == wanted and re.match(rf"\s*{re.escape(key)}\s*=", line):
            return number
    return 0


def parse(text: str, name: str = "config", overrides: Sequence[str] = ()) -> Config:
    """A Config from TOML text, then ``section.key=value`` overrides. ConfigError names key, expectation and line."""
    try:
        raw: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    for entry in overrides:
        _override(raw, entry)
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        message = str(error)
        where = re.search(r" - at `\$\.?(.*)`$", message)
        path = where.group(1) if where else ""
        what = message[: where.start()] if where else message
        unknown = re.search(r"unknown field `(\w+)`", what)
        if unknown:
            path = f"{path}.{unknown.group(1)}" if path else unknown.group(1)
            what = f"unknown key{_suggestion(path)}"
        line = _line_of(text, path)
        raise ConfigError(f"{name}{f', line {line}' if line else ''}: {path or 'top level'}: {what}") from None


def _override(raw: dict[str, Any], entry: str) -> None:
    """Set one dotted key; the value is TOML where it parses as such and a plain string otherwise."""
    path, equals, value = entry.partition("=")
    section, dot, key = path.strip().partition(".")
    if not equals or not dot:
        raise ConfigError(f"an override is written section.key=value, not {entry!r}")
    try:
        parsed = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    raw.setdefault(section, {})[key] = parsed


def _suggestion(path: str) -> str:
    """A hint at the keys that the section of an unknown one does have."""
    *sections, key = path.split(".")
    section: type[Any] = Config
    for part in sections:
        section = type(getattr(section(), part, None))
    names = getattr(section, "__struct_fields__", ())
    return f"; [{'.'.join(sections) or 'top'}] knows {', '.join(names)}" if names and key not in names else ""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A Config from a TOML file, or from the JSON in which a run keeps what it really ran with; an empty path means
    all defaults."""
    if not str(path):
        return parse("", "defaults", overrides)
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file; deploy/demo.toml is a good start") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    if file.suffix == ".json":
        try:
            return msgspec.json.decode(text, type=Config)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{file}: {error}") from None
    return parse(text, str(file), overrides)
