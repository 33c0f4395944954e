"""systemd units: one per process, one for the broker, one for the live page beside it, and a target that starts all."""

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
LIMITS = "LimitNOFILE=65536\nTasksMax=4096\nOOMPolicy=stop"


def unit(process: Process, binary: str) -> str:
    """The unit of one process of actors."""
    hardened, devices = HARDENED, "PrivateDevices=yes"
    if process.machines:
        # QEMU opens /dev/kvm, and the environment actor reads files of /proc that ProcSubset=pid hides.
        hardened = hardened.replace("ProcSubset=pid\n", "")
        devices = "DevicePolicy=closed\nDeviceAllow=/dev/kvm rw\nSupplementaryGroups=kvm"
    elif process.device:
        devices = "DevicePolicy=closed\nDeviceAllow=char-nvidia rw\nDeviceAllow=char-nvidia-uvm rw"
    command = " ".join([binary, *process.words])
    return f"""[Unit]
Description=headrace: {", ".join(process.actors) or "the live page"}
After=network-online.target
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
User=headrace
Group=headrace
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


def broker() -> str:
    """The unit of nats-server on the host of the broker."""
    return f"""[Unit]
Description=headrace: the broker
After=network-online.target
Wants=network-online.target
PartOf=headrace.target

[Service]
Type=simple
ExecStart=/usr/bin/env nats-server -c /etc/headrace/nats.conf -sd /var/lib/headrace-broker
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


def files(config: Config, binary: str) -> dict[str, str]:
    """Name to content. binary: path of `headrace` on the hosts. The broker's host runs headrace-nats and
    headrace-dashboard, and has nats.conf."""
    planned = processes(config)
    out = {f"headrace-{process.name}.service": unit(process, binary) for process in planned}
    out["headrace-nats.service"] = broker()
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
