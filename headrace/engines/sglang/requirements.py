"""The requirements of the SGLang engine: consistent keys, a supported release, a staging folder. Imports no torch."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from headrace import timed_commands
from headrace.config import Engine as EngineSection
from headrace.engines.registry import Problem, Requirement
from headrace.engines.sglang.probes import versions

ANSWER_S = 1.0


def problems(section: EngineSection) -> Iterator[Problem]:
    """Each key of the section that this engine cannot use as it is, with the reason."""
    if bool(section.url) == bool(section.python):
        yield "kind", "expected either engine.url (a running server) or engine.python (to start one) for sglang"
    if section.exact:
        yield "exact", "expected false with engine.kind = 'sglang': exact mode is the embedded engine's alone"
    if section.device != "auto":
        yield (
            "device",
            f"expected auto with engine.kind = 'sglang' (engine.args names its devices), got {section.device}",
        )

    yield from _servers(section)


def _servers(section: EngineSection) -> Iterator[Problem]:
    """Contradictions of the number of servers and their devices."""
    devices = [device.strip() for seen in section.server_devices for device in seen.split(",")]
    if section.url and (section.servers > 1 or devices):
        yield (
            "servers",
            "expected 1 and no engine.server_devices with engine.url: they are for servers that are started",
        )
    elif devices and len(section.server_devices) != section.servers:
        yield (
            "server_devices",
            f"expected one entry for each of {section.servers} servers, got {len(section.server_devices)}",
        )
    elif section.servers > 1 and not devices and "cpu" not in section.args:
        yield "server_devices", f"expected the GPUs of each of {section.servers} servers, such as '0,1'; got none"
    elif len(set(devices)) < len(devices):
        twice = next(device for device in devices if devices.count(device) > 1)
        yield "server_devices", f"expected each GPU once, got {twice} more than once"


def requirements(section: EngineSection) -> Iterator[Requirement]:
    """Checks for a supported release, installed or running, and for the folder that holds checkpoints."""
    if section.python:
        yield _installed(section)
    elif section.url:
        yield _running(section)
    if not Path(section.stage_dir).is_dir():
        text = f"there is no folder {section.stage_dir}; create it, or set another engine.stage_dir"
        yield Requirement("stage_dir", False, text)


def _installed(section: EngineSection) -> Requirement:
    question = "from importlib.metadata import version; print(version('sglang'))"
    try:
        done = timed_commands.run([section.python, "-c", question], 10 * ANSWER_S)
    except OSError as error:
        text = f"{section.python} cannot be started ({error.strerror}); run `make test-sglang`"
        return Requirement("python", False, text)
    except subprocess.TimeoutExpired:
        return Requirement("python", False, f"{section.python} did not answer; expected a Python interpreter")
    if done.returncode:
        return Requirement("python", False, f"{section.python} has no package sglang; install it (docs/sglang.md)")
    return _release("python", done.stdout.decode("utf-8", "replace").strip())


def _running(section: EngineSection) -> Requirement:
    try:
        with urllib.request.urlopen(f"{section.url.rstrip('/')}/server_info", timeout=ANSWER_S) as reply:
            release = str(json.load(reply).get("version", "unknown"))
    except (OSError, ValueError, AttributeError) as error:
        text = f"{section.url}/server_info does not answer ({error}); start the SGLang server"
        return Requirement("url", False, text)
    return _release("url", release)


def _release(key: str, release: str) -> Requirement:
    lacking = versions.lacks(release)
    if lacking:
        newest = versions.VERIFIED[-1]
        text = f"SGLang {release} lacks {lacking}; install {newest} (deploy/sglang/requirements.txt)"
        return Requirement(key, False, text)
    return Requirement(key, True, versions.said(release))
