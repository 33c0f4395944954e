"""Sections of episodes: tasks, limits, concurrency, evaluation, the product lane."""

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import (
    Amount,
    Count,
    Duration,
    Host,
    HttpUrl,
    OptionalPath,
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
    """An external MCP server whose tools tasks may offer as ``SERVER/TOOL``. It has either a command or an address."""

    command: tuple[Word, ...] = ()
    """Program and arguments; it speaks MCP over its standard streams."""
    env: tuple[Variable, ...] = ()
    """Names of further environment variables that the command gets."""
    url: HttpUrl = ""
    """Address of a server that speaks streamable HTTP."""
    key_file: OptionalPath = ""
    """File whose only line is the bearer token for the address; empty: none is sent."""
    start_s: Duration = 30.0
    """Longest wait for the server's start."""
    calls: Positive = 20
    """The most calls of one episode, over all tools of the server."""
    call_s: Duration = 30.0
    """Longest wait for one answer."""
    result_bytes: Positive = 20_000
    """The most bytes of one answer; the rest is cut."""


class Tasks(Section, frozen=True, kw_only=True):
    """The run's suites, and the conditions under which it trains on them."""

    suite: Path = "generated/train"
    """The suite that the run trains on; `client`: the sessions of clients' own loops (docs/clients.md)."""
    heldout: Path = "generated/heldout"
    """Suite of held-out tasks: measured before and after training, and the one of the gate and of simulated users."""
    unseen: Path = "generated/unseen"
    """A further suite that is measured before and after training."""
    dir: Path = "suites"
    """Folder of the suites that `headrace tasks` makes or imports."""
    at_risk: bool = False
    """Also train on tasks at risk, which a policy may pass without a repair (docs/verdicts.md)."""
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
    """The linter and the search service behind tools of the same names."""

    lint: tuple[Text, ...] = ()
    """The linter of the tasks' images for the tool `lint`: a program of the sandbox and its arguments, such as
    ["npx", "eslint", "."]. A task's own `lint` goes first. Empty: ruff, or a check of Python files without it."""

    web_search: HttpUrl = ""
    """Address of a search service for the tool `web_search`, with {query} where the query stands; it answers in JSON as
    SearXNG does (format=json). Only tasks whose `network` lists its host reach it. Empty: tasks that name none do not
    offer the tool."""


class Limits(Section, frozen=True, kw_only=True):
    """Limits of an episode. With `policy.checkpoint` those that are not set follow from the model's positions: up to 50
    turns of 4,096 tokens in a context of 32,768 (headrace/config/checkpoints.py)."""

    max_turns: Positive = 6
    """Turns of an episode, summaries not counted; with the last one it ends."""
    max_turn_tokens: Positive = 48
    """Most sampled tokens of one turn."""
    max_tokens: Positive = 256
    """Sampled tokens of an episode, over all turns; with the last one it ends."""
    context_tokens: Positive = 512
    """Tokens of the context, of prompts and turns together, at which a summary is requested that replaces it."""
    wall_s: Duration = 120.0
    """Seconds of an episode; it ends after the turn in which they are over. A task's own time limit replaces them."""
    max_parallel_calls: Annotated[int, Meta(ge=1, le=1024)] = 6
    """Most tool calls of one turn; those beyond are answered with an error."""
    reserve_tokens: Count = 0
    """Tokens that are kept free for a summary with its thinking: the summary is requested this many tokens before
    context_tokens."""


class AgentLimits(Limits, frozen=True, kw_only=True):
    """Limits of a run of an agent; those that are not here are as in [limits]."""

    max_turns: Positive = 50
    """Turns of a run, summaries not counted; with the last one it ends."""
    max_turn_tokens: Positive = 4096
    """Most sampled tokens of one turn, also of a turn that a client's agent requests."""
    max_tokens: Positive = 200_000
    """Sampled tokens of a run, over all turns; with the last one it ends."""
    context_tokens: Positive = 32_768
    """Tokens of the context at which a summary is requested that replaces it; the longest context of a client's agent,
    which summarises by itself."""
    wall_s: Duration = 1800.0
    """Seconds of a run; it ends after the turn in which they are over."""


class Curriculum(Section, frozen=True, kw_only=True):
    """Groups, batches, and the largest staleness of their tokens."""

    group_size: Annotated[int, Meta(ge=2, le=1024)] = 8
    """Slots of a group: attempts at the same task, whose rewards are compared."""
    groups_per_step: Annotated[int, Meta(ge=1, le=65536)] = 8
    """P: groups of a batch."""
    staleness: Annotated[int, Meta(ge=0, le=64)] = 1
    """Largest staleness of a token that is trained on, in policy versions: the version that the step trains minus the
    one that sampled the token."""
    steps: Count = 40
    """Training steps of the run; each trains on one batch."""
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Most attempts of a slot or of a user's session: the next one is issued when infrastructure failed the last."""
    on_stale: Literal["wait", "drop"] = "wait"
    """When enough groups are complete for the next batch, and a slower group would be too stale for a later one. wait:
    the batch waits for that group. drop: the group is dropped."""
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    """Sampling temperature of training attempts."""
    replace_flat: Count = 0
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups whose rewards are all equal are dropped (reason flat) and
    replaced, at most this many per batch that has begun; later batches may use what earlier ones did not. Beyond the
    limit such a group stays in its batch and has no gradient."""


class Rollout(Section, frozen=True, kw_only=True):
    """Rollout actors: concurrent episodes, lanes, and how long attempts wait."""

    credit: Annotated[int, Meta(ge=1, le=10_000)] = 48
    """Episodes of one lane that a rollout actor runs at once: the engine batches over them."""
    lanes: tuple[Literal["train", "eval", "production"], ...] = ()
    """Lanes that a rollout actor without a lease pulls. Empty: with a product lane, the actors in [production] rollouts
    pull production and the others train and eval; without a product lane, every actor pulls all three."""
    wait_s: Duration = 21_600.0
    """How long an attempt waits for a live rollout actor, for a policy version, or for capacity of an environment node;
    then it fails with dead_letter, no_policy or no_capacity. The first version is published after mid-training. A run
    waits as long for a role that it needs and that has no live actor (judge, trainer, dead_letter, evaluator,
    certifier); then the curriculum ends with an error that names the role."""
    node_wait_s: Duration = 600.0
    """How long an attempt waits while no environment node answers; then it fails with no_environment."""


class Judge(Section, frozen=True, kw_only=True):
    """The judge: concurrent trajectories, second verdicts, the reward's time, and the rubric's model."""

    credit: Annotated[int, Meta(ge=1, le=10_000)] = 32
    """Trajectories that a judge works on at once; with group isolation the trajectories of a group share one clone."""
    again: Share = 0.05
    """Share of verdicts from shared clones that are made a second time, in a clone of their own. A suspicious verdict
    is always made a second time."""
    rubric: OptionalPath = ""
    """TOML file of the criteria that a model judges beside the tests (docs/judges.md); empty: those of tasks alone."""
    rubric_weight: Annotated[float, Meta(ge=0.0, le=1e3)] = 0.0
    """Weight of the rubric's value in the built-in reward; 0 records it without effect."""
    rubric_card: OptionalPath = ""
    """The judge's card (`headrace eval --judge`): criteria below its floors weigh nothing."""
    model_url: HttpUrl = ""
    """Any endpoint that speaks the OpenAI API, such as ``http://127.0.0.1:30000/v1``."""
    model: Text = ""
    """The model's name at that endpoint."""
    model_folder: OptionalPath = ""
    """The folder of the weights that the endpoint serves: the hash of its files pins the judge of a run. Empty: the
    model's name pins it."""
    model_key_file: OptionalPath = ""
    """File whose only line is the API key; empty: no key is sent."""
    model_votes: Annotated[int, Meta(ge=1, le=99)] = 3
    """Answers per criterion. The order in which "met" and "not met" are offered alternates."""
    model_s: Duration = 120.0
    """Seconds within which an answer must arrive, retries included; after them the attempt is an infrastructure
    failure."""
    model_parallel: Positive = 8
    """Requests of one judge actor at once."""
    model_prices: tuple[Amount, Amount] = (0.0, 0.0)
    """Price of a million prompt tokens, and of a million completion tokens."""


class Evaluation(Section, frozen=True, kw_only=True):
    """Measurements of the policy before, during and after training."""

    heldout_tasks: Count = 200
    """Number of tasks of [tasks] heldout that are measured before and after training; 0: none."""
    unseen_tasks: Count = 48
    """Number of tasks of [tasks] unseen that are measured before and after training; 0: none."""
    before: bool = True
    """Measure version 0 before training, at temperature 1."""
    before_greedy: bool = False
    """Measure before training with greedy sampling too, not only at temperature 1."""
    after: bool = True
    """Measure the last version after training, at temperature 1 and with greedy sampling."""
    every: Count = 0
    """Number of steps between two measurements during training; 0: no measurements during training."""
    every_suites: tuple[Path, ...] = ()
    """Suites of the measurements during training; empty: [tasks] heldout."""
    every_tasks: Positive = 32
    """Number of tasks of each suite that are measured during training, counted from the suite's first."""


class Production(Section, frozen=True, kw_only=True):
    """The product lane: its gateway, its own rollout actors, and the scavenger that lends them."""

    enabled: bool = True
    """Run the product lane: gateway, feedback, scavenger and the rollout actors in `rollouts`."""
    host: Host = "127.0.0.1"
    """Address at which the gateway listens."""
    port: Port = 0
    """HTTP port of the gateway; 0 takes a free one, written to <run dir>/gateway.json."""
    public_urls: tuple[HttpUrl, ...] = ()
    """Further addresses of the gateway, as https://name:port: for example a proxy's. The gateway accepts requests
    whose header Host names one of them, `host`, this machine or loopback. Origin, if sent, must be one of them."""
    tenant: Token = "default"
    """Tenant of the users of headrace's own agent; clients with an API key have the key's tenant."""
    training_allowed: bool = False
    """Opt-in of `tenant`: its rated sessions may be trained on. It is checked when a session is rated and again when a
    batch is made. Tenants with API keys opt in by their keys (`headrace keys --add --training`)."""
    turns_at_once: Positive = 256
    """Turns of clients that a gateway has sampled at once, further ones wait: the slots of the production lane's
    engines, divided by the gateways. One tenant gets at most three quarters of them."""
    idle_s: Duration = 900.0
    """A client's session ends after this time without a request."""
    limits: AgentLimits = AgentLimits()
    """Limits of one run of an agent (`/v1/agents`), in the table [production.limits]."""
    webhook_hosts: tuple[Host, ...] = ()
    """Hosts that an agent's webhook may name; empty: none."""
    git_hosts: tuple[Host, ...] = ()
    """Hosts from which the gateway clones an agent's workspace over https; empty: none."""
    rollouts: tuple[Token, ...] = ("product",)
    """Ids of the rollout actors that belong to the product and may be lent."""
    reclaim_above: Count = 0
    """Largest number of running and waiting sessions at which capacity is lent; above it, lent capacity is reclaimed at
    once."""
    lend_after_s: Seconds = 3.0
    """Seconds that the number of sessions must not be above `reclaim_above` before capacity is lent."""
    lend_again_s: Seconds = 600.0
    """Seconds after a reclaim before the same capacity is lent again: users meet lent capacity once in this time."""
    forecast_s: Seconds = 300.0
    """Capacity is lent when neither the mean load of this time nor its trend, extended over the same time, is above
    `reclaim_above`; so not within this time of the scavenger's start. 0: the present load alone counts."""
    simulated_requests_per_s: Amount = 0.0
    """Requests a second at noon of simulated users of the gateway, with a day-and-night rhythm; 0: no such users."""
