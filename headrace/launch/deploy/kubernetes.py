"""Kubernetes manifests: the broker as a StatefulSet, a Deployment per process, machines by a device plugin.

No pod is privileged and none has a service account's token. `/dev/kvm` comes from KubeVirt's device plugin
(devices.kubevirt.io/kvm), accelerators come from NVIDIA's device plugin.
"""

import json
from typing import Any

from headrace.bus.broker.websocket import ANYWHERE
from headrace.config import Config
from headrace.launch.deploy import plan
from headrace.launch.deploy.plan import CREDENTIALS, Process, processes
from headrace.launch.site import Site

NAMESPACE = "headrace"
USER = 10001
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


def _pod(name: str, container: dict[str, Any], volumes: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"app.kubernetes.io/part-of": "headrace", "app": name}},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 45,
            "securityContext": {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER, "runAsNonRoot": True},
            "containers": [{"name": name, "securityContext": _SECURITY, **container}],
            "volumes": volumes,
        },
    }


def deployment(process: Process, image: str, port: dict[str, Any] | None) -> dict[str, Any]:
    """One process of actors, or the live page. Its work is redelivered, so a pod may be replaced at any time.

    port: at which it serves metrics or the page."""
    name = f"headrace-{process.name}"
    limits: dict[str, str] = {"memory": "8Gi"}
    if process.machines:
        limits["devices.kubevirt.io/kvm"] = "1"
    if process.device:
        limits["nvidia.com/gpu"] = "1"
    container = {
        "image": image,
        "command": ["headrace"],
        "args": [*process.words, *(() if process.actors else ("--host", ANYWHERE))],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "HOME", "value": "/tmp"}],
        "workingDir": "/var/lib/headrace",
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": limits},
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/headrace/run.toml", "subPath": "run.toml", "readOnly": True},
            {"name": "credentials", "mountPath": CREDENTIALS, "readOnly": True},
            {"name": "state", "mountPath": "/var/lib/headrace"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        **({"ports": [port]} if port else {}),
    }
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": "headrace-run"}},
        {"name": "credentials", "secret": {"secretName": "headrace-credentials", "defaultMode": 0o440}},
        {"name": "state", "persistentVolumeClaim": {"claimName": "headrace-state"}}
        if "trainer" in process.actors
        else {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(name),
        "spec": {
            "replicas": 1,
            # The broker refuses the writes of the earlier of two trainers, so the old pod ends first.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {"app": name}},
            "template": _pod(name, container, volumes),
        },
    }


def broker(image: str, site: Site | None) -> list[dict[str, Any]]:
    """The broker with its store, and the name under which processes find it. site: of the live page."""
    ports = [("nats", 4222), *([("websocket", site.websocket_port)] if site is not None else [])]
    wanted = ["users.conf", *(["server.pem", "server.key"] if site is not None and site.tls else [])]
    container = {
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
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Gi"}}},
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
                "template": _pod("nats", container, volumes),
                "volumeClaimTemplates": [claim],
            },
        },
    ]


def manifests(config: Config, toml: str, nats_conf: str, image: str) -> list[dict[str, Any]]:
    """Every object. The secret is made by hand from the credentials folder: seeds are never written into manifests."""
    served = config.metrics.enabled and config.metrics.port
    metrics = {"name": "metrics", "containerPort": config.metrics.port} if served else None
    page = plan.page(config)
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _meta("headrace-run"),
            "data": {"run.toml": toml, "nats.conf": nats_conf},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": _meta("headrace-state"),
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Gi"}}},
        },
        *broker(image, page[1] if page is not None else None),
        *(deployment(process, image, metrics) for process in processes(config)),
        *(live_page(*page, image) if page is not None else ()),
    ]


def live_page(process: Process, site: Site, image: str) -> list[dict[str, Any]]:
    """The live page, for `kubectl port-forward`: its pod admits only the addresses of `[dashboard]`."""
    name = f"headrace-{process.name}"
    return [
        deployment(process, image, {"name": "page", "containerPort": site.port}),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _meta(name),
            "spec": {"selector": {"app": name}, "ports": [{"name": "page", "port": site.port}]},
        },
    ]


def files(config: Config, toml: str, nats_conf: str, image: str) -> dict[str, str]:
    """Name to content."""
    items = {"apiVersion": "v1", "kind": "List", "items": manifests(config, toml, nats_conf, image)}
    return {"headrace.json": json.dumps(items, indent=1) + "\n"}
