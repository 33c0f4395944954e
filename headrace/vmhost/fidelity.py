"""The fact sheet of a sandbox, as the tools inside it can see it.

A policy must not be able to tell a training sandbox from a production one. The sheet is taken from inside, under the
tools' user, by the same operations that a policy has; `differences` of two sheets from two lanes must be empty.
"""

from headrace.messages.sandbox import Exec, Sandbox

_SHEET = r"""
say() { printf '%s\t' "$1"; shift; "$@" 2>&1 | tr '\n\t' '; ' ; echo; }
say user id -un
say groups id -Gn
say environment sh -c 'env | grep -v -E "^(_|PWD|OLDPWD|SHLVL)=" | sort'
say folder pwd
say uname uname -srm
say hostname hostname
say cmdline cat /proc/cmdline
say mounts sh -c 'cut -d" " -f2-4 /proc/mounts | sed -E "s/(uid|gid)=[0-9]+/\1/g"'
say root ls -a /
say devices ls -a /dev
say tmp ls -a /tmp
say limits sh -c 'ulimit -a'
say memory sh -c 'grep MemTotal /proc/meminfo'
say cpus sh -c 'grep -c processor /proc/cpuinfo'
say cpu sh -c 'grep -m1 "model name" /proc/cpuinfo'
say processes sh -c 'cat /proc/[12]/comm'
say first sh -c 'tr "\0" " " < /proc/1/cmdline'
say status sh -c 'grep -E "^(NoNewPrivs|Seccomp|CapEff|CapBnd)" /proc/self/status'
say python python3 -c 'import sys; print(sys.version, sys.flags, sys.path)'
say clock sh -c 'cat /sys/devices/system/clocksource/clocksource0/current_clocksource'
say network sh -c 'cat /proc/net/dev | cut -d: -f1'
"""


async def sheet(sandbox: Sandbox) -> dict[str, str]:
    """Fact to value. The slot's number, which its user id carries, is the one thing left out."""
    result = await sandbox.call(Exec(argv=("sh", "-c", _SHEET), timeout_s=60.0))
    rows = (line.partition("\t") for line in result.stdout.splitlines())
    return {name: value.strip("; ") for name, _, value in rows}


def differences(one: dict[str, str], other: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Facts that tell two sandboxes apart."""
    names = sorted(one.keys() | other.keys())
    return {name: (one.get(name, ""), other.get(name, "")) for name in names if one.get(name) != other.get(name)}
