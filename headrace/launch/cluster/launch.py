"""`headrace launch`: check every host, send it its files, start the broker's host first, then all others at once.

Nothing of a run depends on this process once a host has its files. After a kill -9 a second launch takes over the hosts
that run and starts the others, and `stop` ends all of them (cluster/host.py).
"""

import asyncio
import shlex
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from headrace.launch.cluster.file import Cluster, Node, read
from headrace.launch.cluster.host import BUSY, MODULE, TAKEN
from headrace.launch.cluster.plan import HostPlan, names, plan
from headrace.launch.cluster.ssh import HostError, call, everywhere
from headrace.launch.cluster.state import LOGS, State
from headrace.launch.output import complain, say
from headrace.launch.runs import RunError


def _python(host: Node) -> str:
    """The host's interpreter with the host's environment, as shell words."""
    return shlex.join(["env", *(f"{name}={value}" for name, value in host.environment.items()), host.python])


def _in_folder(host: Node, command: str) -> str:
    return f"cd {shlex.quote(host.folder)} && exec {_python(host)} -P -m {MODULE} {command}"


def _checking(host: Node) -> str:
    """A script that ends with one sentence when the host cannot run headrace."""
    folder, python = shlex.quote(host.folder), shlex.quote(host.python)
    return f"""umask 077
command -v {python} >/dev/null \\
  || {{ echo "there is no "{python}"; install headrace there, or set python" >&2; exit 3; }}
{_python(host)} -P -c 'import headrace.launch.cluster' 2>/dev/null \\
  || {{ echo {python}" cannot import headrace.launch.cluster; install this version of headrace there" >&2; exit 3; }}
mkdir -p {folder} 2>/dev/null && test -w {folder} \\
  || {{ echo "cannot write to "{folder}"; make the folder for this user, or set folder" >&2; exit 3; }}"""


async def start(path: Path) -> int:
    """Start the run on all hosts, and take over hosts that run it already. When one fails, the hosts that this call
    started are stopped again."""
    cluster = read(path)
    plans = plan(cluster, path.parent)
    await everywhere(cluster.hosts, lambda host: call(cluster, host, _checking(host)))
    say(_page(plans))
    by_name = {host_plan.host.name: host_plan for host_plan in plans}
    begun: list[Node] = []

    async def begin(host: Node) -> str:
        archive = by_name[host.name].archive()
        begun.append(host)
        try:
            answer = await call(cluster, host, _in_folder(host, f"start {sha256(archive).hexdigest()}"), archive)
        except HostError as error:
            if error.status == BUSY:
                begun.remove(host)
            raise
        if answer.strip() == TAKEN:
            begun.remove(host)
        return answer.strip()

    brokers, others = _split(cluster.hosts)
    try:
        answers = await everywhere(brokers, begin)
        answers |= await everywhere(others, begin)
    except BaseException as failure:
        try:
            await _stop(cluster, begun)
        except RunError as error:
            raise RunError(f"{failure or 'interrupted'}\nheadrace: {error}", 3) from None
        raise
    for host_plan in plans:
        taken = f" ({TAKEN}: it ran already, with the same files)" if answers[host_plan.host.name] == TAKEN else ""
        place = f"{host_plan.host.address}:{host_plan.host.folder}/{LOGS}/"
        say(f"{host_plan.host.name}: {', '.join(names(host_plan.order))}; logs in {place}{taken}")
    say(f"run {plans[0].order.run} is started; `headrace launch {path} status` shows it, `... stop` ends it")
    return 0


def _page(plans: Sequence[HostPlan]) -> str:
    """The address of the live page, or why there is none."""
    for host_plan in plans:
        if host_plan.order.page is not None:
            host = host_plan.host
            port = f"-p {host.port} " if host.port != 22 else ""
            target = f"{host.user}@{host.address}" if host.user else host.address
            key = "its key is in the run's folder there, in page.json"
            return f"live page: {host_plan.order.page.reached(port + target)}; {key}"
    if not any(host_plan.broker for host_plan in plans):
        return "no live page: no host has the broker; `headrace dashboard --config run.toml` serves it from here"
    return "no live page: [dashboard] enabled = false"


def _split(hosts: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The host of the broker, and the others."""
    brokers = [host for host in hosts if any(process.broker for process in host.processes)]
    return brokers, [host for host in hosts if host not in brokers]


async def _stop(cluster: Cluster, hosts: Sequence[Node]) -> None:
    """Stop hosts, the broker's host last, because draining actors use the broker. Failures are reported after every
    host was tried."""
    brokers, others = _split(hosts)
    errors = []
    for chosen in (others, brokers):
        try:
            await everywhere(chosen, lambda host: call(cluster, host, _ending(host)))
        except RunError as error:
            errors.append(str(error))
    if errors:
        raise RunError("\nheadrace: ".join(errors), 3)


def _ending(host: Node) -> str:
    folder = shlex.quote(host.folder)
    return f"test -d {folder} || exit 0; {_in_folder(host, 'stop')}"


async def stop(path: Path) -> int:
    """Stop the run on all hosts."""
    cluster = read(path)
    await _stop(cluster, cluster.hosts)
    say(f"no process of the run is left on {len(cluster.hosts)} hosts")
    return 0


async def status(path: Path) -> int:
    """Print a line per host and per process; 1 when a host does not run."""
    cluster = read(path)

    async def one(host: Node) -> tuple[Node, State | None, str]:
        try:
            answer = await call(cluster, host, _in_folder(host, "status"))
            return host, msgspec.json.decode(answer, type=State), ""
        except HostError as error:
            return host, None, str(error)
        except msgspec.DecodeError as error:
            return host, None, f"its answer cannot be read: {error}"

    good = True
    for host, state, error in await asyncio.gather(*(one(host) for host in cluster.hosts)):
        if state is None or state.state != "running":
            good = False
        if state is None:
            complain(f"host {host.name} ({host.address}:{host.port}): {error}")
            continue
        say(f"{host.name} ({host.address}): {state.state}{f': {state.error}' if state.error else ''}")
        for part in state.processes if state.state == "running" else []:
            again = f", started again {part.restarts} times, last: {part.cause}" if part.restarts else ""
            say(f"  {part.name:<20} pid {part.pid}{again}")
    return 0 if good else 1


async def logs(path: Path, lines: int) -> int:
    """Print the last lines of every log of every host."""
    cluster = read(path)
    tail = f"tail -n {lines} -v *.log"
    outputs = await everywhere(
        cluster.hosts, lambda host: call(cluster, host, f"cd {shlex.quote(f'{host.folder}/{LOGS}')} && {tail}")
    )
    for host in cluster.hosts:
        for line in outputs[host.name].splitlines():
            say(f"{host.name}: {line}")
    return 0
