"""Sections of training: mid-training, the objective and its guard, the trainer, replay."""

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import (
    Above0,
    Address,
    Amount,
    Count,
    Device,
    Duration,
    Option,
    OptionalPath,
    Positive,
    Rate,
    Reference,
    Section,
    Share,
    Threads,
    Word,
)

Sequence = Annotated[int, Meta(ge=2, le=1 << 24)]
"""Number of tokens of a sequence; the first one is not a target."""


class Data(Section, frozen=True, kw_only=True):
    """One source of mid-training, a table [[mid_training.data]] (docs/data.md)."""

    kind: Reference
    """generated: traces of tool use; chat: JSONL of conversations; text: plain files, or JSONL with `text`;
    trajectories: a file of `headrace export --as data`; or an entry point of headrace.readers, or module:attribute."""
    path: OptionalPath = ""
    """A file, or a folder whose files are read; none for generated."""
    weight: Above0 = 1.0
    """The source's share of the tokens is its weight over the sum of all weights."""
    epochs: Count = 0
    """Number of times that the source is read; 0 repeats it until `tokens` are reached."""


class Phase(Section, frozen=True, kw_only=True):
    """A later phase of mid-training, a table [[mid_training.phases]], such as one with a long context."""

    start: Share
    """Share of `tokens` after which the phase begins."""
    sequence: Sequence
    """Replaces `mid_training.sequence` in this phase."""
    batch_tokens: Count = 0
    """Replaces `mid_training.batch_tokens` in this phase; 0 keeps it."""


class MidTraining(Section, frozen=True, kw_only=True):
    """Supervised training on traces, before any rollout."""

    tokens: Count = 3_000_000
    """Tokens to train on, without the first of every sequence; 0: no mid-training, as with `policy.checkpoint`, which
    needs none."""
    batch_tokens: Positive = 1024
    """Tokens of a batch: it takes sequences until it has as many."""
    learning_rate: Rate = 3e-3
    """Learning rate at the end of the warm-up."""
    warmup: Share = 0.03
    """Share of the tokens over which the learning rate rises."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """The learning rate after the warm-up: linear and cosine fall to a tenth of the peak at the last token."""
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.98
    """AdamW's decay of the mean of squared gradients, per step."""
    traces: Literal["repairs", "notes"] = "repairs"
    """The generated traces: repairs of the repositories of generated/train, or work with self-summaries on the tasks of
    generated/notes (headrace/tasks/generated/note_traces.py)."""
    quality: Share = 0.35
    """Share of traces without a planted fault."""
    multi_line: Share = 0.72
    """Share of repairs whose broken function has several lines; the suites have 0.5."""
    broad: Share = 0.0
    """Share of repairs of functions that no suite has, three of four composed at random (headrace/tasks/generated/
    composed, broad_templates.py): a pretrained policy then learns to repair instead of memorising the suites'
    functions."""
    retries: Share = 0.25
    """Share of the faultless repairs that first make a wrong edit, see a test fail, and look again. The wrong turn is
    context and has no loss."""
    context_weight: Share = 0.05
    """Loss weight of the tokens that a policy reads; those that it writes have 1. A pretrained policy needs 0."""
    processes: Threads = 2
    """Processes that share each batch, one torch thread each. The number changes the bits of the result. With several
    ranks the shares of a batch, which they compute. A GPU computes a batch as one share."""
    data: tuple[Data, ...] = ()
    """Sources, as tables [[mid_training.data]]. Empty: generated traces alone."""
    sequence: Sequence = 4096
    """Most tokens of one sequence of `data`: text is cut into such parts, and what is longer of others is dropped."""
    phases: tuple[Phase, ...] = ()
    """Later phases, as tables [[mid_training.phases]], in the order of their `start`."""
    held_out: Annotated[float, Meta(ge=0.0, le=0.5)] = 0.01
    """Share of the documents of each source of `data`, by a hash of their content, that is not trained on."""
    evaluate_every: Positive = 200
    """Steps between two measurements of the loss on held-out documents."""
    evaluate_tokens: Positive = 32768
    """Most tokens of a source that a measurement of the loss on held-out documents reads."""


class Options(Section, frozen=True, kw_only=True):
    """Options of plugins, a table for each seam."""

    advantage: dict[str, Option | list[Option]] = {}
    """Options of the function that `advantage` names."""
    loss: dict[str, Option | list[Option]] = {}
    """Options of the function that `weighting` names."""
    reward: dict[str, Option | list[Option]] = {}
    """Options of the function that `reward` names."""


class Algorithm(Section, frozen=True, kw_only=True):
    """The objective (Dr. GRPO, changed part by part by these keys), its corrections, and the guard against a
    collapse."""

    learning_rate: Rate = 1e-3
    """Learning rate at the end of the warm-up; 1e-6 with `policy.checkpoint`."""
    warmup_steps: Count = 2
    """Updates over which the learning rate rises; a step makes `minibatches` of them."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: linear and cosine fall over `decay_steps` to a tenth of the peak."""
    decay_steps: Count = 0
    """Updates after the warm-up over which the schedules linear and cosine fall."""
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.95
    """AdamW's decay of the mean of squared gradients, per update."""
    moments: Literal["float32", "bfloat16", "eight_bit"] = "float32"
    """Format in which AdamW's two moments are kept between updates. bfloat16 saves 4 of their 8 bytes per parameter,
    eight_bit (blocks with a scale, headrace/algorithms/eight_bit.py) 6. Mid-training in one process keeps float32."""
    weight_decay: Amount = 0.0
    """AdamW's decoupled weight decay: each update lowers a weight by this times the learning rate times the weight.
    Norms, biases and the embedding do not decay; matrices do, with adapters theirs. Mid-training has
    none."""
    balance_rate: Amount = 0.0
    """Per step, the amount by which the router's correction (e_score_correction_bias) of each expert rises when the
    batch routed fewer rows to it than to the layer's mean expert, and falls when it routed more (DeepSeek-V3, arXiv
    2412.19437, with 0.001). It changes the experts that later versions choose, and no gradient; corrections are
    published, hashed and saved with the weights. The figure is `expert_load`. Only for policies with corrections
    (deepseek_v3, kimi_k2, glm4_moe). 0: corrections stay."""
    baseline: Literal["group", "class"] = "group"
    """The rewards that an advantage is relative to: those of the other rollouts of the prompt, or those of the batch's
    rollouts of the same task class, where there is one rollout per prompt (users' sessions)."""
    advantage: Reference = "mean"
    """From a group's rewards to advantages: mean (Dr. GRPO), normalised (GRPO), leave_one_out (RLOO), an entry point of
    headrace.advantages, or module:attribute."""
    tis_clip: Above0 = 2.0
    """Upper bound on p_trainer / p_sampler as a token's weight."""
    weighting: Reference = "truncated"
    """truncated: weights above the bound become the bound; masked: tokens above the bound or below its inverse have no
    gradient; clipped, decoupled, sequence and sequence_masked are in headrace/algorithms/corrections.py, with their
    papers; or an entry point of headrace.losses, or module:attribute."""
    dual_clip: Amount = 0.0
    """With weighting = clipped, decoupled or sequence, the bound c of dual clip (Ye et al., arXiv 1912.09729): a token
    with a negative advantage A counts c A and has no gradient where its probability ratio is above c. 3.0 is the
    paper's; 0 is no bound, and a single unlikely token can then be most of a gradient."""
    ratio_low: Amount = 0.8
    """Lower end of the band of probability ratios of clipped, decoupled, sequence and sequence_masked."""
    ratio_high: Above0 = 1.2
    """Upper end of the band that begins at `ratio_low`; clip-higher (DAPO) is 0.8 to 1.28, GSPO's own band 0.9997 to
    1.0004."""
    minibatches: Annotated[int, Meta(ge=1, le=65536)] = 1
    """Number of updates into which a batch is split; decoupled differs from truncated from the second update on."""
    kl_weight: Amount = 0.0
    """Weight of the KL divergence from the reference: the weights at the start of RL, of which the trainer keeps a
    copy."""
    kl: Literal["k1", "k3"] = "k1"
    """Estimator of the KL divergence of `kl_weight`: k1, a cost on each token's advantage, or k3, GRPO's loss term."""
    grad_clip: Amount = 1.0
    """Largest norm of an update's gradient; a longer gradient is scaled down to it."""
    max_grad_norm: Amount = 0.0
    """A step whose gradient norm (before clipping) is above this is refused; 0 is no limit."""
    guard_k1: Amount = 0.0
    """k1 above which the guard suspects a collapse (headrace/training/guard.py); 0 turns the guard off."""
    guard_patience: Positive = 2
    """Consecutive steps above `guard_k1` after which the guard rolls back. It rolls back earlier if reward or entropy
    confirms the collapse (headrace/training/guard.py)."""
    guard_backoff: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """Factor by which each rollback multiplies the learning rate."""
    reward: Reference = "shaped"
    """A reward of the registry: shaped, an installed entry point of `headrace.rewards`, or module:attribute. The
    options of shaped are penalties for effort, length, open to-dos and broken calls: `rewards.Shaped` names them."""
    options: Options = Options()
    """Tables advantage, loss and reward: the options that a plugin reads in a type of its own (docs/extending.md)."""
    constant_tokens: Count = 64
    """Dr. GRPO's constant divisor instead of each sequence's length; 0 divides by the batch's sampled tokens (DAPO),
    which suits long trajectories and is the default with `policy.checkpoint`."""
    sequence_mean: bool = False
    """Each sequence's terms are averaged over its own tokens (GSPO, GRPO), and constant_tokens is not read."""
    overlong: Literal["train", "mask"] = "train"
    """mask: attempts that a limit of length ended (outcomes context, max_tokens and max_turns; a client's session whose
    last reply reached its limit) have no gradient and do not count in the loss's divisor. Their rewards stay in the
    baseline and in the figures, as scored: the other attempts of a group have the advantages that they have with train
    (DAPO's overlong filtering, arXiv 2503.14476). Attempts that wall time or memory ended are trained on."""

    def __post_init__(self) -> None:
        if self.schedule != "constant" and self.decay_steps < 1:
            raise ValueError(f"schedule {self.schedule!r} needs decay_steps of at least 1, got {self.decay_steps}")


class Lora(Section, frozen=True, kw_only=True):
    """Low-rank adapters (LoRA): training changes them alone, and a delta carries nothing else."""

    rank: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Rank of every adapter; 0: no adapters, all weights are trained."""
    alpha: Annotated[float, Meta(gt=0.0, le=65536.0)] = 32.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: tuple[Annotated[str, Meta(max_length=64)], ...] = ()
    """Adapted projections, by the last part of Hugging Face's names; empty: all of attention and of a dense MLP.
    Experts are adapted where their name is given, by the provider transformers alone."""


class Mesh(Section, frozen=True, kw_only=True):
    """The mesh of a trainer's processes, of which there are replicate x shard."""

    replicate: Threads = 1
    """Copies of weights and optimizer (HSDP). 1: one copy is in shards over all processes of all nodes."""
    shard: Threads = 1
    """Processes that hold one copy of weights and optimizer, each a shard of it (FSDP)."""
    expert: Threads = 1
    """Processes that share one copy of a mixture's experts, each with some of them; it divides `shard`. 1 shards
    experts like all other weights."""
    context: Threads = 1
    """Processes that share the tokens of each micro-batch (context parallelism), for sequences whose activations one
    device cannot hold; it divides `shard` and the policy's key-value heads. 1: each process has micro-batches of its
    own."""


class Trainer(Section, frozen=True, kw_only=True):
    """The trainer's process."""

    device: Device = "auto"
    """Device of the model and the optimizer: auto (the first CUDA device, else the CPU), cpu, cuda or cuda:N."""
    offload: Literal["none", "optimizer"] = "none"
    """optimizer: float32 masters and AdamW's moments are in the host's memory and are updated there; with a GPU a step
    is slower and needs less of its memory. Of several ranks all shards are there, those of the reference policy too. On
    a CPU it changes nothing."""
    threads: Threads = 1
    """Torch threads of each rank."""
    mesh: Mesh = Mesh()
    """Processes that train together, [trainer.mesh]. The actor is one; it starts the others of its machine, and
    `headrace trainer join` starts them on another node. On CUDA each has one device, and `device` must not name one."""
    node_ranks: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Processes of the mesh on each node; 0: all of them are on the actor's machine, which is node 0. `headrace trainer
    join` starts the processes of another node."""
    rendezvous: Address = ""
    """HOST:PORT at which the actor waits for the other nodes: an address of its machine that they reach. Needed with
    several nodes. It asks for no key, so only a private network may reach it."""
    rescore: Count = 8
    """Trajectories re-scored exactly at every step (Law 5)."""
    checkpoint_every: Positive = 10
    """Steps between two checkpoints of weights and optimizer; the last step always writes one."""
    micro_tokens: Positive = 8192
    """Most tokens of a micro-batch, which one backward pass takes; a longer sequence is a micro-batch of its own."""
    peak_tflops: Amount = 0.0
    """Peak of one device, or of one CPU rank, in 10^12 operations a second, for MFU and HFU; 0 takes the data sheet's
    for bfloat16 on boards of A100, H100, GH200, H200, B200 and GB200, and leaves MFU and HFU unknown elsewhere."""
    stall_s: Duration = 1800.0
    """With several ranks: seconds for which a rank may wait for the others in an exchange (a collective of torch),
    after which the group ends and starts again from the checkpoint and the manifests."""
    frozen: tuple[Word, ...] = ()
    """Parameters that training does not change, by patterns over headrace's names: embedding, layers.0.*, norm.
    Layers below the first trained one need no backward pass, and no delta contains a frozen parameter."""
    lora: Lora = Lora()
    """Low-rank adapters, [trainer.lora]: rank (0 is none), alpha, targets. They are then the only trained weights, in
    mid-training too."""

    @property
    def ranks(self) -> int:
        """Processes of the mesh."""
        return self.mesh.replicate * self.mesh.shard

    @property
    def machine_ranks(self) -> int:
        """Processes of the mesh on one machine."""
        return self.node_ranks or self.ranks

    @property
    def nodes(self) -> int:
        """Machines of the mesh."""
        return -(-self.ranks // self.machine_ranks)


class Replay(Section, frozen=True, kw_only=True):
    """How much of a run can be replayed."""

    keep_steps: Count = 1000
    """Number of newest steps whose records and checkpoints are kept; at least staleness + 2."""
    keep_gib: Amount = 0.0
    """Most GiB of records: older steps are dropped before `keep_steps` are reached, but never the newest staleness + 2
    nor a record that is not trained yet. 0 is no limit."""
