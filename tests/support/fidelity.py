"""The fact sheet of a sandbox: everything that stays the same while it lives, as its tools can see it.

A policy must not be able to tell a training sandbox from a production one. The sheet is taken from inside, as the
tools' user, by the operations that a policy has; `differences` of two sheets from two lanes must be empty. Slots differ
in user, devices, inodes and start times, so sheets of the same slot number are compared; the number itself says nothing
about the lane (see slot_assignment).

Values that change from moment to moment are left out: free memory, load, uptime, kernel counters. Siblings that share a
machine influence them; use isolation ``episode`` for training if that matters.
"""

from headrace.messages.sandbox import Exec, Sandbox

_SHEET = r"""
say() { printf '\036%s\037' "$1"; shift; "$@" 2>&1; }
say user id
say groups id -G
say environment sh -c 'env | grep -v -E "^(_|PWD|OLDPWD|SHLVL)=" | sort'
say folder pwd
say uname uname -srm
say hostname uname -n
say cmdline cat /proc/cmdline
say mounts cat /proc/self/mountinfo
say places stat -c "%n %d %i %a %u %g" / /workspace /tmp /dev /dev/shm /proc
say sizes df -k
say namespace readlink /proc/self/ns/mnt
say cgroup cat /proc/self/cgroup
say root sh -c 'ls -lan --full-time / | grep -v -E " (workspace|proc)$"'
say devices ls -lan --full-time /dev
say tmp ls -lan --full-time /tmp
say written sh -c 'for f in *; do test "$f" -nt /tmp && test ! "$f" -nt /proc/self && echo "$f"; done'
say odd ls -a /var/tmp /run /mnt /home /srv /root /etc/machine-id
say limits ulimit -a
say memory grep MemTotal /proc/meminfo
say cpu grep -v MHz /proc/cpuinfo
say processes sh -c 'cut -d" " -f1-8,18-20,22 /proc/[12]/stat; echo /proc/[0-9]*'
say next sh -c 'echo $$ $PPID'
say first sh -c 'tr "\0" " " < /proc/1/cmdline'
say environ cat /proc/1/environ
say status grep -E "^(Uid|Gid|Groups|NoNewPrivs|Seccomp|CapEff|CapBnd|Cpus_allowed|SigIgn|SigBlk)" /proc/self/status
say oom cat /proc/self/oom_score_adj
say kernel sh -c 'cd /proc/sys; grep -s . kernel/[a-q]* kernel/s* vm/o*'
say log dmesg
say modules cat /proc/modules
say python python3 -c 'import os, sys; print(sys.version, sys.flags, sys.path, *os.scandir())'
say inodes ls -ai
say clock cat /sys/devices/system/clocksource/clocksource0/current_clocksource
say network cat /proc/net/dev /proc/net/route /proc/net/tcp /etc/resolv.conf /etc/hosts
"""


async def sheet(sandbox: Sandbox) -> dict[str, str]:
    """Names of facts and their values."""
    result = await sandbox.call(Exec(argv=("sh", "-c", _SHEET), timeout_s=60.0))
    rows = (row.partition("\037") for row in result.stdout.split("\036")[1:])
    return {name: "; ".join(value.split("\n")).strip("; ") for name, _, value in rows}


def differences(one: dict[str, str], other: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Facts that differ between two sandboxes, with both values."""
    names = sorted(one.keys() | other.keys())
    return {name: (one.get(name, ""), other.get(name, "")) for name in names if one.get(name) != other.get(name)}
