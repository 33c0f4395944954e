"""A compose file: the broker and every process as a service, for `docker compose` and `podman-compose`."""

from typing import Any

from headrace.bus.broker.websocket import ANYWHERE
from headrace.config import Config
from headrace.launch.deploy import plan
from headrace.launch.deploy.plan import CREDENTIALS, processes
from headrace.launch.deploy.yaml import document

_SERVICE: dict[str, Any] = {
    "restart": "on-failure",
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "stop_grace_period": "45s",
}


def files(config: Config, image: str) -> dict[str, str]:
    """Name to content. compose.yaml expects run.toml, nats.conf and credentials/ in its folder."""
    page = plan.page(config)
    services: dict[str, Any] = {
        "nats": {
            **_SERVICE,
            "image": image,
            "command": ["nats-server", "-c", "/etc/headrace/nats.conf", "-a", "0.0.0.0", "-sd", "/data"],
            "volumes": ["./nats.conf:/etc/headrace/nats.conf:ro", f"./credentials:{CREDENTIALS}:ro", "broker:/data"],
        }
    }
    planned = processes(config)
    if page is not None:
        process, site = page
        # In a container the listeners are open to the containers beside it; only loopback of the host reaches them.
        services["nats"]["ports"] = [f"127.0.0.1:{site.websocket_port}:{site.websocket_port}"]
        planned.append(process)
    for process in planned:
        services[process.name] = {
            **_SERVICE,
            "image": image,
            "command": ["headrace", *process.words, *(() if process.actors else ("--host", ANYWHERE))],
            "depends_on": ["nats"],
            "environment": {"OMP_NUM_THREADS": "1", "HOME": "/tmp"},
            "tmpfs": ["/tmp"],
            "working_dir": "/var/lib/headrace",
            "volumes": [
                "./run.toml:/etc/headrace/run.toml:ro",
                f"./credentials:{CREDENTIALS}:ro",
                "state:/var/lib/headrace",
            ],
            **({"devices": ["/dev/kvm"]} if process.machines else {}),
            **({"gpus": "all"} if process.device else {}),
        }
    if page is not None:
        services[page[0].name]["ports"] = [f"127.0.0.1:{page[1].port}:{page[1].port}"]
    return {
        "compose.yaml": document({"name": "headrace", "services": services, "volumes": {"broker": {}, "state": {}}})
    }
