"""Sections of episodes: tasks, limits, how many at once, evaluation, the product lane."""

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import (
    Amount,
    Count,
    Duration,
    Host,
    HttpUrl,
    OptionalPath,
    OptionalVariable,
    Path,
    Port,
    Positive,
    Seconds,
    Section,
    Share,
    Text,
    Token,
    Variable,
    Word,
)


class McpServer(Section, frozen=True, kw_only=True):
    """An external MCP server whose tools tasks may offer as ``SERVER/TOOL``. Either a command or an address."""

    command: tuple[Word, ...] = ()
    """Program and arguments; it speaks MCP over its standard streams."""
    env: tuple[Variable, ...] = ()
    """Names of environment variables that the command gets besides the usual few."""
    url: HttpUrl = ""
    """Address of a server that speaks streamable HTTP."""
    key: OptionalVariable = ""
    """Name of the environment variable that holds the bearer token for the address; empty: none is sent."""
    start_s: Duration = 30.0
    """Longest wait for the server's start."""
    calls: Positive = 20
    """Calls of one episode, all tools of the server together."""
    call_s: Duration = 30.0
    """Longest wait for one answer."""
    result_bytes: Positive = 20_000
    """Most bytes of one answer; the rest is cut."""


class Tasks(Section, frozen=True, kw_only=True):
    """Which suites."""

    suite: Path = "generated/train"
    heldout: Path = "generated/heldout"
    unseen: Path = "generated/unseen"
    dir: Path = "suites"
    """Where suites made by `headrace tasks from-sdist` lie."""
    train_on_logs: bool = False
    """Train on suites whose verdicts are read from printed lines, which a policy can forge (tasks/trust.py)."""
    uncertified: bool = False
    """Train on suites without certificates, too: made by users, or without a known solution (tasks/certificates)."""
    certify: bool = False
    """Tasks without a certificate are examined by the actor `certifier` before the first group is issued."""
    tools: tuple[Word, ...] = ()
    """Tools that every task offers besides its own: entry points of `headrace.tools`, module:attribute, or SERVER/TOOL
    of an MCP server."""
    mcp: dict[Token, McpServer] = {}
    """External MCP servers by name, as tables [tasks.mcp.NAME] (docs/mcp.md)."""


class Tools(Section, frozen=True, kw_only=True):
    """The words under which a policy sees its tools. They need a chat format: the terse format shows no tools."""

    vary: bool = False
    """Each training group gets other names for tools and arguments, another order and other descriptions, drawn from
    the run's seed and the group's name (headrace/rendering/wordings.py)."""
    evaluation: Literal["plain", "heldout"] = "plain"
    """Words of evaluations. ``heldout``: those that no training group gets."""


class Limits(Section, frozen=True, kw_only=True):
    """Limits of an episode."""

    max_turns: Positive = 6
    max_turn_tokens: Positive = 48
    max_tokens: Positive = 256
    context_tokens: Positive = 512
    wall_s: Duration = 120.0
    max_parallel_calls: Annotated[int, Meta(ge=1, le=1024)] = 6
    reserve_tokens: Count = 0
    """Context that is kept free for a summary with its thinking: it is asked for so many tokens before
    context_tokens."""
    max_summaries: Count = 64
    """Summaries of one attempt; one more ends it."""


class Curriculum(Section, frozen=True, kw_only=True):
    """Groups, batches, and how stale they may become."""

    group_size: Annotated[int, Meta(ge=2, le=1024)] = 8
    groups_per_step: Annotated[int, Meta(ge=1, le=65536)] = 8
    """P: groups of a batch."""
    staleness: Annotated[int, Meta(ge=0, le=64)] = 1
    steps: Count = 40
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    on_stale: Literal["wait", "drop"] = "wait"
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    speculate: Count = 0
    """Number of last open slots of a group that are issued a second time; the first answer counts. This favours short
    episodes; the audit says by how much."""
    replace_flat: Count = 0
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups whose rewards are all equal are dropped (reason flat) and
    replaced, at most so many for each batch that has begun; what a batch leaves over counts for later ones. Beyond the
    limit they are trained on as before: no gradient, but a place in the batch."""
    actor_wait_s: Duration = 21_600.0
    """How long a run waits while it has no live judge, trainer, dead_letter, evaluator or certifier, whichever it needs
    then: the curriculum ends with a sentence that names the role."""
    canaries: Share = 0.0
    """Share of groups that get a task without a solution (tasks/impossible.py): an attempt that passes it has
    cheated."""


class Rollout(Section, frozen=True, kw_only=True):
    """How many episodes at once."""

    credit: Annotated[int, Meta(ge=1, le=10_000)] = 48
    """Episodes of one lane that a rollout actor runs at once: the engine batches over them."""
    checkpoint_every: Count = 0
    """Turns between checkpoints of a sandbox that has a machine of its own (isolation = episode): when it is lost, the
    attempt resumes in a copy. A few MiB each; 0 makes none, and the attempt is issued again."""
    lanes: tuple[Literal["train", "eval", "production"], ...] = ()
    """Lanes that a rollout actor without a lease pulls. Empty: the product's own actors pull production, the others
    train and eval, and all three without a product lane."""
    node_wait_s: Duration = 600.0
    """How long an attempt waits while no environment node answers at all: then it fails with no_environment."""
    room_wait_s: Duration = 21_600.0
    """How long an attempt waits while every environment node is full: then it fails with no_capacity."""
    rollout_wait_s: Duration = 21_600.0
    """How long requests wait while the run has no live rollout actor at all: then they become dead letters, and their
    attempts fail with dead_letter."""
    version_wait_s: Duration = 21_600.0
    """How long an attempt waits for a policy version: the first one comes after mid-training. Then it fails with
    no_policy."""


class Judge(Section, frozen=True, kw_only=True):
    """How many trajectories at once."""

    credit: Annotated[int, Meta(ge=1, le=10_000)] = 32
    """Trajectories that a judge works on at once; with group isolation a group's share one clone."""
    again: Share = 0.05
    """Share of verdicts from shared clones that are made a second time, in a clone of their own; every suspicious one
    is, whatever the share."""
    severities: dict[Word, Literal["note", "zero"]] = {}
    """Rules of headrace/judging/rules.py with another severity: note reports a match, zero voids the pass."""
    reward_s: Duration = 30.0
    """Seconds that a reward from outside the package may take for one attempt."""
    rubric: OptionalPath = ""
    """TOML file of the criteria that a model judges beside the tests (docs/judges.md); empty: those of tasks alone."""
    rubric_weight: Annotated[float, Meta(ge=0.0, le=1e3)] = 0.0
    """Weight of the rubric's value in the built-in reward; 0 records it without effect."""
    rubric_card: OptionalPath = ""
    """The judge's card (`headrace judge card`): criteria below its floors weigh nothing."""
    rubric_cache: OptionalPath = ""
    """File of the model's answers by content; empty: <run dir>/rubrics.sqlite."""
    model_url: HttpUrl = ""
    """Any endpoint that speaks the OpenAI API, such as ``http://127.0.0.1:30000/v1``."""
    model: Text = ""
    """The model's name at that endpoint."""
    model_folder: OptionalPath = ""
    """The folder of the weights that the endpoint serves: the hash of its files pins the judge of a run. Empty: the
    model's name does."""
    model_key: OptionalVariable = ""
    """Name of the environment variable that holds the API key; empty: no key is sent."""
    model_votes: Annotated[int, Meta(ge=1, le=99)] = 3
    """Answers per criterion. The order in which "met" and "not met" are offered alternates."""
    model_temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.7
    model_s: Duration = 120.0
    """Seconds within which an answer has to come, retries included; after them the attempt is an infrastructure
    failure."""
    model_parallel: Positive = 8
    """Requests of one judge actor at once."""
    model_prices: tuple[Amount, Amount] = (0.0, 0.0)
    """Price of a million prompt tokens, and of a million completion tokens."""


class Evaluation(Section, frozen=True, kw_only=True):
    """Measurements of the policy: before training, while it goes on, and after it."""

    heldout_tasks: Count = 200
    unseen_tasks: Count = 48
    before: bool = True
    before_greedy: bool = False
    """Measure greedily before training too, not only at temperature 1."""
    after: bool = True
    every: Count = 0
    """Measure after every so many steps while training goes on; 0 turns it off."""
    every_suites: tuple[Path, ...] = ()
    """Suites of these measurements; empty: [tasks] heldout."""
    every_tasks: Positive = 32
    """Tasks of each of them, from the suite's first."""
    every_temperature: Amount = 1.0


class Production(Section, frozen=True, kw_only=True):
    """The product lane: its gateway, its own rollout actors, and the scavenger that lends them."""

    enabled: bool = True
    host: Host = "127.0.0.1"
    port: Port = 0
    """HTTP port of the gateway; 0 takes a free one, written to <run dir>/gateway.json."""
    tls_certificate: OptionalPath = ""
    """PEM file of the gateway's certificate chain; empty: plain HTTP. A renewed file is loaded within a minute."""
    tls_key: OptionalPath = ""
    """PEM file of its private key."""
    tenant: Token = "default"
    training_allowed: bool = False
    """Opt-in of `tenant`: its rated sessions may be trained on. It counts when a session is rated and again when a
    batch is made. Tenants with API keys opt in with theirs (`headrace keys add --training`)."""
    keys: OptionalPath = ""
    """File of API keys (`headrace keys`); empty: <run dir>/keys.json."""
    turn_tokens: Positive = 4096
    """Most sampled tokens of a turn that a client's agent asks for."""
    context_tokens: Positive = 32768
    """Longest context, prompt and turn together, of a client's agent."""
    turn_s: Duration = 300.0
    """Longest wait for such a turn."""
    idle_s: Duration = 900.0
    """A client's session ends after this time without a request."""
    limits: Limits = Limits(
        max_turns=50, max_turn_tokens=4096, max_tokens=200_000, context_tokens=32_768, wall_s=1800.0
    )
    """Limits of one run of an agent (`/v1/agents`), in the table [production.limits]."""
    agent_idle_s: Duration = 1800.0
    """How long the sandbox of an agent is held for the next run."""
    command_s: Duration = 120.0
    """Limit of the commands `setup` and `check` of agents side by side."""
    webhook_hosts: tuple[Host, ...] = ()
    """Hosts that an agent's webhook may name; empty: none."""
    git_hosts: tuple[Host, ...] = ()
    """Hosts from which the gateway clones an agent's workspace over https; empty: none."""
    rollouts: tuple[Token, ...] = ("product",)
    """Ids of the rollout actors that belong to the product and may be lent."""
    reclaim_above: Count = 0
    """Sessions running or waiting above this take lent capacity back at once."""
    lend_after_s: Seconds = 3.0
    """Quiet time before capacity is lent."""
    simulate: bool = False
    """Run simulated users against the gateway, with a day-and-night rhythm."""
    day_s: Duration = 40.0
    peak_requests_per_s: Amount = 0.5
