"""Makes the files of each host: the run's configuration, the processes, the keys of its own roles and no others."""

import io
import tarfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.actors.registry import ACTORS
from headrace.bus.broker import credentials, tls
from headrace.bus.broker.permissions import WEB_ROLE
from headrace.bus.broker.server import CONF
from headrace.config import Config, ConfigError, load
from headrace.launch.cluster.file import Cluster, Node, Process, name_of
from headrace.launch.site import LOCAL, Site, site_of

ORDER = "node.json"
"""The file that says which processes a host runs."""
NEEDED = ("curriculum", "environment", "judge", "rollout", "trainer", "weight_sender")
SINGLE = ("curriculum", "trainer", "weight_sender")
"""Actors of which a run has one."""
PUBLIC = f"{credentials.PUBLISHER}.pub"
PAGE = "dashboard"
"""Name of the process that serves the live page, and its role."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of a host, for its keeper."""

    host: str
    run: str
    url: str
    environment: dict[str, str]
    processes: tuple[Process, ...]
    page: Site | None = None
    """The live page, on the broker's host."""


class HostPlan(NamedTuple):
    """A host and its files: name to content."""

    host: Node
    order: Order
    files: dict[str, bytes]

    @property
    def broker(self) -> bool:
        """Whether the host has the run's broker."""
        return any(process.broker for process in self.order.processes)

    def archive(self) -> bytes:
        """The files as a tar, readable by their owner alone."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, content in sorted(self.files.items()):
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o600
                tar.addfile(entry, io.BytesIO(content))
        return out.getvalue()


def plan(cluster: Cluster, base: Path) -> list[HostPlan]:
    """The plan of every host, the broker's first. base: the folder of the cluster's file. ConfigError.

    Keys that do not exist yet are made in the folder of `[bus] credentials`."""
    file = base / cluster.run
    config = load(file)
    for key, value in (
        ("run.id", config.run.id),
        ("bus.url", config.bus.url),
        ("bus.credentials", config.bus.credentials),
    ):
        if not value:
            raise ConfigError(f"{file}: {key}: the processes of several hosts agree on it; set {key}")
    _check(cluster, config, file)
    keys = base / config.bus.credentials
    if not keys.is_dir():
        credentials.write(keys)
    seeds = Path(credentials.of_run(str(keys), config.run.id))
    toml = file.read_bytes()
    plans = [_host(host, config, toml, keys, seeds) for host in cluster.hosts]
    return sorted(plans, key=lambda one: not one.broker)


def _check(cluster: Cluster, config: Config, file: Path) -> None:
    """ConfigError for a plan whose actors would wait for ever or fail on their host."""
    places: dict[str, list[str]] = {}
    for host in cluster.hosts:
        for process in host.processes:
            if name_of(process) == PAGE:
                raise ConfigError(
                    f"host {host.name}: the live page's process is named {PAGE}; name this one differently"
                )
            for actor in process.actors:
                kind = actor.partition(":")[0]
                if kind not in ACTORS:
                    raise ConfigError(f"host {host.name}: unknown actor {actor!r}; expected one of {', '.join(ACTORS)}")
                places.setdefault(kind, []).append(host.name)
            if process.set:
                load(file, process.set)
            if process.broker and "," in config.bus.url:
                raise ConfigError(f"host {host.name}: a broker of one server cannot serve [bus] url with several")
    for kind in NEEDED:
        if kind not in places:
            raise ConfigError(f"no host runs the actor {kind}, and a run needs it; add it to a process")
    for kind in SINGLE:
        if len(places[kind]) > 1:
            raise ConfigError(f"{kind} runs {len(places[kind])} times ({', '.join(places[kind])}); a run has one")
    if places["weight_sender"] != places["trainer"]:
        raise ConfigError(
            f"weight_sender runs on host {places['weight_sender'][0]} and trainer on {places['trainer'][0]}: the "
            f"sender reads the trainer's folder, so put both on one host"
        )
    _refuse_own_folders(cluster, file)
    for name in places["rollout"]:
        if name not in places.get("weight_receiver", []):
            raise ConfigError(f"host {name} runs rollout without weight_receiver, so no version reaches it; add it")


def _refuse_own_folders(cluster: Cluster, file: Path) -> None:
    """ConfigError when hosts share no location of full snapshots: each would look in its own folder."""
    receiving = {
        host.name: load(file, process.set).weights
        for host in cluster.hosts
        for process in host.processes
        if any(actor.startswith("weight_") for actor in process.actors)
    }
    for name, section in receiving.items():
        if not section.full_snapshots_url and len(receiving) > 1:
            raise ConfigError(
                f"host {name}: weights.full_snapshots_url is empty, so the other {len(receiving) - 1} hosts find no "
                f"full snapshot: set it to a location that all hosts reach, such as s3://bucket/prefix"
            )


def _host(host: Node, config: Config, toml: bytes, keys: Path, run_keys: Path) -> HostPlan:
    broker = any(process.broker for process in host.processes)
    page = site_of(config) if broker else None
    order = Order(
        host=host.name,
        run=config.run.id,
        url=config.bus.url,
        environment=host.environment,
        processes=host.processes,
        page=page,
    )
    files = {ORDER: msgspec.json.encode(order), "run.toml": toml}
    kinds = {actor.partition(":")[0] for process in host.processes for actor in process.actors}
    # weight_sender and weight_receiver sign in with the same role.
    roles = {"weight_sync" if kind.startswith("weight_") else kind for kind in kinds}
    wanted = [f"{role}.nk" for role in sorted(roles)]
    if "weight_sender" in kinds:
        wanted.append(f"{credentials.PUBLISHER}.nk")
    if broker:
        folder = f"{host.folder}/credentials"
        wanted.append("admin.nk")
        users = tls.elsewhere((keys / "users.conf").read_text(), keys, folder)
        files["credentials/users.conf"] = users.encode()
        files["nats.conf"] = (CONF.read_text() + (page.conf(folder) if page else "")).encode()
    if page:
        wanted += [f"{PAGE}.nk", f"{WEB_ROLE}.nk"]
        _refuse_plain(page, keys)
    files |= {f"credentials/{name}": content for name, content in tls.files_of(keys, broker=broker).items()}
    for name in (*wanted, PUBLIC, credentials.WRITERS):
        files[f"credentials/{name}"] = _key(run_keys / name, host.name, str(keys))
    return HostPlan(host, order, files)


def _refuse_plain(page: Site, keys: Path) -> None:
    """ConfigError when the broker has a certificate and the page's WebSocket would be open to others without it, or
    the other way round."""
    certificate = keys / "server.pem"
    if page.tls and not certificate.exists():
        raise ConfigError(f"dashboard.websocket is an https:// address, and there is no {certificate}")
    if not page.tls and certificate.exists() and not page.websocket_host.startswith(LOCAL):
        raise ConfigError(
            f"the broker has a certificate, and its WebSocket would be open without it: set [dashboard] websocket to "
            f'"https://{page.websocket_host}:{page.websocket_port}", or [dashboard] host to 127.0.0.1'
        )


def _key(path: Path, host: str, folder: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; host {host} needs this key: complete the folder with "
            f"`python -m headrace.bus.broker.credentials {folder}`"
        ) from None


def environment(order: Order, process: Process, inherited: dict[str, str]) -> dict[str, str]:
    """The environment of a process: the host's, its own above it, and the devices that it may see."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    out = settings | inherited | order.environment | process.environment
    if process.devices:
        out["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, process.devices))
    return out


def names(order: Order) -> list[str]:
    """The names of a host's processes."""
    return [name_of(process) for process in order.processes] + ([PAGE] if order.page else [])
