"""Every address at which a part of headrace listens: who is let in, and what a client can do there.

docs/listeners.md is generated from this table, and a test compares the sockets of a run with it
(tests/launch/test_listeners.py). Nothing else listens: QEMU's monitors and the channels to sandboxes are socket pairs
that children inherit, machines have no network card, MCP and ACP servers talk over standard input and output.
"""

from typing import NamedTuple


class Listener(NamedTuple):
    """One kind of listening socket."""

    name: str
    address: str
    """By default, and the keys that change it."""
    opened: str
    """By which process, and when."""
    admits: str
    """How a client proves who it is."""
    offers: str
    """The things that a client can do once it is let in."""
    demo: bool = False
    """Whether `headrace up` opens it in deploy/demo.toml."""


BROKER = "broker"
WEBSOCKET = "broker's WebSocket"
GATEWAY = "gateway"
PAGE = "live page"
METRICS = "metrics"

LISTENERS = (
    Listener(
        BROKER,
        "127.0.0.1, a free port; `[bus] port`",
        "nats-server of `headrace up`; of `nats.conf` where you start one",
        "the NKEY of a role, from `broker/credentials` (mode 0600)",
        "publish and read what the role's row in [permissions.md](permissions.md) says",
        demo=True,
    ),
    Listener(
        WEBSOCKET,
        "127.0.0.1, a free port; `[dashboard] websocket`, the page's next port in a launched or deployed run",
        "nats-server, if `[dashboard] enabled`",
        "the page's Origin, and the NKEY of a role; the page has the key of `web`",
        "as `web`: subscribe to records without users' data, publish nothing",
        demo=True,
    ),
    Listener(
        "broker's routes and leaf nodes",
        "`ROUTE_PORT`, `LEAF_PORT` of deploy/cluster and deploy/regions",
        "nats-server of a cluster or of a hub",
        "the secret of the cluster; the NKEY of the role `region` over TLS",
        "be a member of the cluster; what the row of `region` says",
    ),
    Listener(
        GATEWAY,
        "127.0.0.1, a free port; `[production] host`, `port`",
        "the process of the actor gateway, if `[production] enabled`",
        "an API key in a header; Host is one of its names, no foreign Origin; `/healthz` needs no key",
        "the routes of the key's scopes for its tenant ([clients.md](clients.md)); `/healthz`: run, version, load",
        demo=True,
    ),
    Listener(
        PAGE,
        "127.0.0.1, a free port; `[dashboard] host`, `port`",
        "`headrace up`, `headrace dashboard`",
        "the page's key in a header; its own Host and Origin alone; the static files need no key",
        "read the run without users' records, and with a token of `--users` all of it; change nothing",
        demo=True,
    ),
    Listener(
        METRICS,
        "127.0.0.1, a free port per process; `[metrics] host`, `port`",
        "every process of a run, if `[metrics] enabled`",
        "the key of `<run dir>/metrics.key` or `[metrics] key` in `Authorization: Bearer`",
        "read the process's figures",
        demo=True,
    ),
    Listener(
        "full snapshots",
        "127.0.0.1, a free port; `[weights] peer_host`, `peer_port`",
        'weight sender and receivers, if `[weights] full_snapshots = "peer"`',
        "a secret of the run in `Authorization: Bearer`, from `weight_peers.key`",
        "read the weights that the node holds, by version and hash",
    ),
    Listener(
        "rendezvous of a trainer's nodes",
        "`[trainer] rendezvous`",
        "node 0 of a trainer, if `[trainer] nodes` is above 1",
        "nothing: name an address of a private network",
        "join the group as a node, and get the configuration",
    ),
    Listener(
        "torch's store",
        "127.0.0.1, a free port; with several nodes the host of `[trainer] rendezvous`",
        "the first rank, if `[trainer] ranks` is above 1",
        "nothing",
        "read and write the group's places, and so disturb the group",
    ),
    Listener(
        "gloo and NCCL",
        "free ports of loopback; with several nodes of the interface that leads to `[trainer] rendezvous`, unless "
        "`GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` name another",
        "every rank, if `[trainer] ranks` is above 1",
        "nothing",
        "take a rank's place in the exchange of gradients and orders while the group is formed",
    ),
    Listener(
        "SGLang",
        "127.0.0.1, a reserved port",
        'the server of a rollout actor, if `[engine] kind = "sglang"` without `url`',
        "nothing: every user of the machine reaches it",
        "sample, load weights, pause and flush the server; SGLang's own processes have further ports on loopback",
    ),
    Listener(
        "tunnel of a sandbox",
        "127.0.0.1 inside the sandbox's own network namespace",
        "the slot's agent, if the task lists hosts",
        "nothing: only the sandbox reaches it",
        "connect to the listed hosts through the environment's process",
    ),
)


def table() -> str:
    """The page docs/listeners.md."""
    lines = [
        "# What listens",
        "",
        "Generated by `make docs` from `headrace/launch/checks/listeners.py`. The defaults keep all on loopback.",
        "A second user of the machine, and a page of another site in your browser, get health answers alone",
        "(`tests/launch/test_listeners.py`).",
        "",
        "| what | address | opened by | lets in | offers | in the demo |",
        "|---|---|---|---|---|---|",
    ]
    for each in LISTENERS:
        cells = (each.name, each.address, each.opened, each.admits, each.offers, "yes" if each.demo else "no")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
