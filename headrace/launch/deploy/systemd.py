"""systemd units: one per process, two for the broker and its streams, one for the live page beside it, and a target.

A host gets the units of its own processes; the target starts those that it finds. Actors of the broker's host start
after it and end before it, so that they drain while it answers.
"""

from pathlib import PurePath
from urllib.parse import urlsplit

from headrace.config import Config
from headrace.launch.deploy import plan
from headrace.launch.deploy.plan import CREDENTIALS, Process, processes

HARDENED = """NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
ProcSubset=pid
PrivateTmp=yes
PrivateUsers=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
UMask=0077
RemoveIPC=yes"""
PLAIN = "NoNewPrivileges=yes\nProtectHome=yes\nProtectClock=yes\nProtectHostname=yes\nPrivateTmp=yes\nUMask=0077"
"""Of a process that makes containers: it mounts images, makes namespaces and control groups."""
LIMITS = "LimitNOFILE=65536\nTasksMax=4096\nOOMPolicy=stop"


def unit(process: Process, binary: str) -> str:
    """The unit of one process of actors."""
    hardened, devices, user = HARDENED, "PrivateDevices=yes", "headrace"
    if process.root:
        hardened, devices, user = PLAIN, "Delegate=yes", "root"
    elif process.machines:
        # QEMU opens /dev/kvm, and the environment actor reads files of /proc that ProcSubset=pid hides.
        hardened = hardened.replace("ProcSubset=pid\n", "")
        devices = "DevicePolicy=closed\nDeviceAllow=/dev/kvm rw\nSupplementaryGroups=kvm"
    elif process.devices:
        devices = "DevicePolicy=closed\nDeviceAllow=char-nvidia rw\nDeviceAllow=char-nvidia-uvm rw"
    command = " ".join([binary, *process.words])
    return f"""[Unit]
Description=headrace: {", ".join(process.actors) or "the live page"}
After=network-online.target headrace-nats.service
Wants=network-online.target
PartOf=headrace.target
StartLimitIntervalSec=600
StartLimitBurst=20

[Service]
Type=notify
NotifyAccess=main
WatchdogSec=60
ExecStart={command}
Restart=on-failure
RestartSec=2
RestartPreventExitStatus=2 3
TimeoutStopSec=45
KillMode=mixed
User={user}
Group={user}
StateDirectory=headrace
WorkingDirectory=/var/lib/headrace
ReadOnlyPaths={CREDENTIALS}
Environment=OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
{devices}
{hardened}
{LIMITS}

[Install]
WantedBy=headrace.target
"""


def broker(url: str, binary: str) -> str:
    """The unit of the nats-server beside headrace, which listens at the address of `[bus] url`."""
    address, server = urlsplit(url), PurePath(binary).with_name("nats-server")
    return f"""[Unit]
Description=headrace: the broker
After=network-online.target
Wants=network-online.target
PartOf=headrace.target

[Service]
Type=simple
ExecStart={server} -c /etc/headrace/nats.conf -a {address.hostname} -p {address.port or 4222} \\
  -sd /var/lib/headrace-broker
ExecReload=/bin/kill -HUP $MAINPID
Restart=always
RestartSec=2
KillSignal=SIGUSR2
TimeoutStopSec=60
User=headrace
Group=headrace
StateDirectory=headrace-broker
PrivateDevices=yes
{HARDENED}
{LIMITS}

[Install]
WantedBy=headrace.target
"""


def streams(binary: str) -> str:
    """The unit that declares the streams as soon as the broker answers; actors are started again until they exist."""
    return f"""[Unit]
Description=headrace: the streams of the broker
After=headrace-nats.service
Requires=headrace-nats.service
PartOf=headrace.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={binary} bus declare --config /etc/headrace/run.toml
Restart=on-failure
RestartSec=1
RestartPreventExitStatus=2 3
User=headrace
Group=headrace
StateDirectory=headrace
WorkingDirectory=/var/lib/headrace
ReadOnlyPaths={CREDENTIALS}
PrivateDevices=yes
{HARDENED}
{LIMITS}

[Install]
WantedBy=headrace.target
"""


def files(config: Config, binary: str) -> dict[str, str]:
    """Name to content. binary: path of `headrace` on the hosts. The broker's host has headrace-nats, headrace-streams,
    headrace-dashboard and nats.conf; several servers in `[bus] url` are brokers of one's own, without units."""
    planned = processes(config)
    out = {f"headrace-{process.name}.service": unit(process, binary) for process in planned}
    if "," not in config.bus.url:
        out |= {"headrace-nats.service": broker(config.bus.url, binary), "headrace-streams.service": streams(binary)}
    if page := plan.page(config):
        out["headrace-dashboard.service"] = unit(page[0], binary)
    wants = " ".join(sorted(out))
    out["headrace.target"] = f"""[Unit]
Description=headrace: run {config.run.id}
Wants={wants}

[Install]
WantedBy=multi-user.target
"""
    out["nats.conf"] = plan.broker_conf(config)
    return out
