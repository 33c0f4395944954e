"""Sections of the ground: the run, the bus, processes, machines for sandboxes."""

from typing import Literal

from headrace.config.base import Section

Backend = Literal["auto", "qemu", "process"]


class Run(Section, frozen=True, kw_only=True):
    """One run: its seed, its name, its folder."""

    seed: int = 1
    id: str = ""
    """Empty: made from date, time and seed."""
    dir: str = "runs"
    """Folder of runs; the streams, checkpoints and reports of a run lie in <dir>/<id>."""
    min_free_mb: int = 2048
    """MiB that must be free for a run to start; it is stopped in order when an eighth of that is left."""


class Bus(Section, frozen=True, kw_only=True):
    """The broker, and how to speak to it."""

    url: str = ""
    """Empty: `headrace up` starts a nats-server on loopback with nats.conf."""
    port: int = 0
    """Port of the started server; 0 takes a free one."""
    credentials: str = ""
    """Folder of per-role credentials, made per run when headrace starts the server."""
    region: str = "local"
    otlp_endpoint: str = ""
    """OTLP/HTTP collector such as http://127.0.0.1:4318; empty exports nothing."""
    blob_dir: str = ""
    """Folder such as /dev/shm through which actors of one node hand each other large payloads of episodes
    (headrace/bus/nearby.py); empty: all of it goes through the broker."""
    blob_upload: Literal["before", "after", "never"] = "after"
    """When such a payload is stored at the broker too; never is for one node, with a folder on the broker's disk."""


class Processes(Section, frozen=True, kw_only=True):
    """Which actors share an operating-system process: one list per process."""

    groups: tuple[tuple[str, ...], ...] = (
        ("curriculum", "evaluator", "dead_letter"),
        ("gateway", "feedback", "scavenger"),
        ("environment",),
        ("judge",),
        ("rollout",),
        ("trainer",),
        ("weight_sender", "weight_receiver"),
    )


class Environment(Section, frozen=True, kw_only=True):
    """Machines for sandboxes on a node."""

    backend: Backend = "auto"
    """auto: qemu where it works, else an error that says why. process is not isolated and must be asked for."""
    accel: Literal["auto", "kvm", "tcg"] = "auto"
    """auto: kvm if a machine really boots under it, else tcg."""
    isolation: Literal["episode", "group"] = "group"
    slots_per_vm: int = 8
    memory_mb: int = 224
    max_vms: int = 8
    """Clones alive at once on this node; judge_share of them are kept for the judge."""
    judge_share: int = 2
    production_share: int = 0
    """Machines that only the judge and the production lane may take."""
    warm: int = 1
    """Clones of the light template kept ready and stopped, within max_vms: they take an acquire from 40 ms to 6.
    0: none, whatever is asked for."""
    also_warm: tuple[str, ...] = ()
    """Further templates (debian, imported images, tasks) of which `warm` clones are always kept ready."""
    warm_most: int = 4
    """Clones of any one template kept ready for a minute after so many were taken at once."""
    max_busy: float = 0.95
    """Share of the node's processors that machines may use, over five seconds, before training gets no further one;
    users and the judge do. 0: never mind."""
    lease_s: float = 120.0
    group_idle_s: float = 10.0
    cache_dir: str = ".cache/headrace"
    """Guest image and templates, content-addressed; survives runs."""
