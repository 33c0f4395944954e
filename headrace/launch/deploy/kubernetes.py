"""Kubernetes manifests: the broker as a StatefulSet, a Deployment per pod (`pods`), machines by a device plugin.

No pod is privileged and none has a service account's token. `/dev/kvm` comes from KubeVirt's device plugin
(devices.kubevirt.io/kvm), accelerators come from NVIDIA's device plugin.
"""

import itertools
import json
from collections.abc import Sequence
from typing import Any

from headrace.bus.broker.websocket import ANYWHERE
from headrace.config import Config, versions
from headrace.gateway.http import HEALTH
from headrace.launch.checks import servers
from headrace.launch.deploy import plan
from headrace.launch.deploy.plan import CREDENTIALS, Process, processes
from headrace.launch.site import Site
from headrace.policy.layout import sizes

NAMESPACE = "headrace"
USER = 10001
STATE = "/var/lib/headrace"
_SECURITY = {
    "allowPrivilegeEscalation": False,
    "privileged": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def _meta(name: str) -> dict[str, Any]:
    return {"name": name, "namespace": NAMESPACE, "labels": {"app.kubernetes.io/part-of": "headrace", "app": name}}


def _pod(name: str, containers: list[dict[str, Any]], volumes: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"app.kubernetes.io/part-of": "headrace", "app": name}},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 45,
            "securityContext": {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER, "runAsNonRoot": True},
            "containers": [{"securityContext": _SECURITY, **container} for container in containers],
            "volumes": volumes,
        },
    }


def pods(config: Config) -> list[list[Process]]:
    """The processes of each pod. Those of a pod share its host name, its files and its memory: the sender reads the
    trainer's file, and rollout actors load what a receiver of their own node has. Where full snapshots are at a
    location that several nodes reach, rollout actors have a pod of their own, else they are in the trainer's."""
    apart = bool(config.weights.full_snapshots_url)
    learns, samples, others = list[Process](), list[Process](), list[list[Process]]()
    for process in processes(config):
        kinds = {name.partition(":")[0] for name in process.actors}
        if kinds & {"trainer", "weight_sender"}:
            learns.append(process)
        elif kinds & {"rollout", "weight_receiver"}:
            (samples if apart else learns).append(process)
        else:
            others.append([process])
    return [each for each in (learns, samples) if each] + others


def _container(
    process: Process, image: str, config: Config, mounts: list[dict[str, Any]], place: int
) -> dict[str, Any]:
    """place: in its pod, whose containers share its ports."""
    limits: dict[str, str] = {"memory": f"{memory_gib(process, config)}Gi"}
    if process.machines:
        limits["devices.kubevirt.io/kvm"] = "1"
    if process.devices:
        limits["nvidia.com/gpu"] = str(process.devices)
    sets, ports = list[str](), list[dict[str, Any]]()
    if process.actors and config.metrics.enabled and config.metrics.port:
        sets += [f"metrics.port={config.metrics.port + place}"]
        ports += [{"name": f"metrics-{place}", "containerPort": config.metrics.port + place}]
    served = servers.options_of(config.engine)
    if served is not None and served.server_devices and any(name.startswith("rollout") for name in process.actors):
        sets += [f"engine.options.server_devices={json.dumps(renumbered(served.server_devices))}"]
    serves = "gateway" in process.actors
    if serves:
        names = (f"headrace-{process.name}", f"headrace-{process.name}.{NAMESPACE}")
        urls = [*config.production.public_urls, *(f"http://{name}:{gateway_port(config)}" for name in names)]
        sets += [f'production.host="{ANYWHERE}"', f"production.port={gateway_port(config)}"]
        sets += [f"production.public_urls={json.dumps(urls)}"]
        ports += [{"name": "gateway", "containerPort": gateway_port(config)}]
    probe = {"httpGet": {"path": HEALTH, "port": "gateway"}, "periodSeconds": 10}
    return {
        "name": f"headrace-{process.name}",
        "image": image,
        "command": ["headrace"],
        "args": [*process.words, *(word for each in sets for word in ("--set", each))],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "HOME", "value": "/tmp"}],
        "workingDir": STATE,
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": limits},
        "volumeMounts": mounts,
        **({"ports": ports} if ports else {}),
        **({"readinessProbe": probe} if serves else {}),
    }


def gateway_port(config: Config) -> int:
    """Where the gateway listens: a service needs a port that is known."""
    return config.production.port or 8750


def renumbered(devices: Sequence[str]) -> list[str]:
    """The GPUs of servers, as a container that has only these numbers them."""
    numbers = itertools.count()
    return [",".join(str(next(numbers)) for _ in seen.split(",")) for seen in devices]


def memory_gib(process: Process, config: Config) -> int:
    """The memory of a process: what any needs, and the versions of its node, whose files count for who reads them. A
    trainer also holds a checkpoint, as it reads or writes one, and an optimizer that is kept on the host."""
    kinds = {name.partition(":")[0] for name in process.actors}
    needed = 8 << 30
    if kinds & {"trainer", "rollout", *plan.VERSIONS}:
        needed += versions.versions_kept(config) * sizes.version_bytes(config)
    if "trainer" in kinds:
        needed += sizes.checkpoint_bytes(config)
    return -(-needed >> 30)


def deployment(
    group: Sequence[Process], image: str, config: Config, port: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A pod of processes. Their work is redelivered, so a pod may be replaced at any time.

    port: at which the live page is served."""
    name = f"headrace-{group[0].name}"
    shared: list[dict[str, Any]] = [
        {"name": "config", "mountPath": "/etc/headrace/run.toml", "subPath": "run.toml", "readOnly": True},
        {"name": "credentials", "mountPath": CREDENTIALS, "readOnly": True},
        {"name": "state", "mountPath": STATE},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    trains = any("trainer" in process.actors for process in group)
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": "headrace-run"}},
        {"name": "credentials", "secret": {"secretName": "headrace-credentials", "defaultMode": 0o440}},
        _claim("state") if trains else {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    holds = any(name.partition(":")[0] in ("trainer", "rollout", *plan.VERSIONS) for p in group for name in p.actors)
    if holds and config.weights.memory_dir:
        shared.append({"name": "memory", "mountPath": config.weights.memory_dir})
        volumes.append({"name": "memory", "emptyDir": {"medium": "Memory"}})
    if holds and config.weights.full_snapshots_url.startswith("/"):
        shared.append({"name": "snapshots", "mountPath": config.weights.full_snapshots_url})
        volumes.append(_claim("snapshots"))
    if port is None:
        containers = [_container(process, image, config, shared, place) for place, process in enumerate(group)]
    else:
        containers = [_container(group[0], image, config, shared, 0) | {"ports": [port]}]
        containers[0]["args"] += ["--host", ANYWHERE]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(name),
        "spec": {
            "replicas": 1,
            # The broker refuses the writes of the earlier of two trainers, so the old pod ends first.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {"app": name}},
            "template": _pod(name, containers, volumes),
        },
    }


def _claim(name: str) -> dict[str, Any]:
    return {"name": name, "persistentVolumeClaim": {"claimName": f"headrace-{name}"}}


def _volume(name: str, mode: str, size: int) -> dict[str, Any]:
    """size: in bytes."""
    storage = f"{max(64, -(-size >> 30))}Gi"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _meta(f"headrace-{name}"),
        "spec": {"accessModes": [mode], "resources": {"requests": {"storage": storage}}},
    }


def _service(name: str, ports: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(name),
        "spec": {"selector": {"app": name}, "ports": ports},
    }


def broker(image: str, config: Config, site: Site | None) -> list[dict[str, Any]]:
    """The broker with its store, and the name under which processes find it. site: of the live page."""
    ports = [("nats", 4222), *([("websocket", site.websocket_port)] if site is not None else [])]
    wanted = ["users.conf", *(["server.pem", "server.key"] if site is not None and site.tls else [])]
    container = {
        "name": "nats",
        "image": image,
        "command": ["nats-server"],
        "args": ["-c", "/etc/headrace/nats.conf", "-a", "0.0.0.0", "-sd", "/data", "-m", "8222"],
        "ports": [{"name": name, "containerPort": port} for name, port in (*ports, ("monitor", 8222))],
        "startupProbe": {
            "httpGet": {"path": "/healthz", "port": "monitor"},
            "failureThreshold": 90,
            "periodSeconds": 2,
        },
        "livenessProbe": {"httpGet": {"path": "/healthz?js-server-only=true", "port": "monitor"}, "periodSeconds": 10},
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "config", "mountPath": "/etc/headrace/nats.conf", "subPath": "nats.conf", "readOnly": True},
            {"name": "users", "mountPath": "/etc/headrace/credentials", "readOnly": True},
        ],
    }
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": "headrace-run"}},
        {
            "name": "users",
            "secret": {
                "secretName": "headrace-credentials",
                "items": [{"key": name, "path": name} for name in wanted],
                "defaultMode": 0o440,
            },
        },
    ]
    claim = {
        "metadata": {"name": "data"},
        "spec": _volume("", "ReadWriteOnce", stream_bytes(config))["spec"],
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _meta("nats"),
            "spec": {
                "clusterIP": "None",
                "selector": {"app": "nats"},
                "ports": [{"name": name, "port": port} for name, port in ports],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": _meta("nats"),
            "spec": {
                "replicas": 1,
                "serviceName": "nats",
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": {"app": "nats"}},
                "template": _pod("nats", [container], volumes),
                "volumeClaimTemplates": [claim],
            },
        },
    ]


def stream_bytes(config: Config) -> int:
    """Bytes of the broker's store: the records of the kept steps, and the versions' deltas."""
    return sum(sizes.record_bytes(config).values()) + versions.stream_bytes(config, sizes.version_bytes(config))


def state_bytes(config: Config) -> int:
    """Bytes of the trainer's disk: checkpoints, versions that are not in memory, and full snapshots that are there."""
    version = sizes.version_bytes(config)
    held = 0 if config.weights.memory_dir else versions.versions_kept(config)
    held += 0 if config.weights.full_snapshots_url else versions.chains_kept(config)
    return versions.checkpoints_kept(config) * sizes.checkpoint_bytes(config) + held * version


def manifests(config: Config, toml: str, nats_conf: str, image: str) -> list[dict[str, Any]]:
    """Every object. The secret is made by hand from the credentials folder: seeds are never written into manifests."""
    page = plan.page(config)
    version = sizes.version_bytes(config)
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _meta("headrace-run"),
            "data": {"run.toml": toml, "nats.conf": nats_conf},
        },
        _volume("state", "ReadWriteOnce", state_bytes(config)),
        *broker(image, config, page[1] if page is not None else None),
        *(deployment(group, image, config) for group in pods(config)),
    ]
    if config.weights.full_snapshots_url.startswith("/"):
        objects.append(_volume("snapshots", "ReadWriteMany", versions.chains_kept(config) * version))
    for process in processes(config):
        if "gateway" in process.actors:
            objects.append(_service(f"headrace-{process.name}", [{"name": "gateway", "port": gateway_port(config)}]))
    if page is not None:
        process, site = page
        objects.append(deployment([process], image, config, {"name": "page", "containerPort": site.port}))
        objects.append(_service(f"headrace-{process.name}", [{"name": "page", "port": site.port}]))
    return objects


def files(config: Config, toml: str, nats_conf: str, image: str) -> dict[str, str]:
    """Name to content."""
    items = {"apiVersion": "v1", "kind": "List", "items": manifests(config, toml, nats_conf, image)}
    return {"headrace.json": json.dumps(items, indent=1) + "\n"}
