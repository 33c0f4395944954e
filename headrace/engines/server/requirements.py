"""Requirements of every engine over a server: consistent options and its package. Imports no torch."""

import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator

from headrace import timed_commands
from headrace.config import Engine as EngineSection
from headrace.engines.registry import Problem, Requirement
from headrace.engines.server.options import ServerOptions

ANSWER_S = 1.0


def problems(section: EngineSection, options: ServerOptions) -> Iterator[Problem]:
    """Each key that this engine cannot use as it is, with the reason."""
    kind = section.kind
    if bool(options.url) == bool(options.python):
        yield "options", f"expected either url (a running server) or python (to start one) for {kind}"
    if section.exact:
        yield "exact", f"expected false with engine.kind = {kind!r}: exact mode is the embedded engine's alone"
    if section.device != "auto":
        text = f"expected auto with engine.kind = {kind!r} (engine.options.args names its devices)"
        yield "device", f"{text}, got {section.device}"
    devices = [device.strip() for seen in options.server_devices for device in seen.split(",")]
    if options.url and (options.servers > 1 or devices):
        yield "options.servers", "expected 1 and no server_devices with url: they are for servers that are started"
    elif devices and len(options.server_devices) != options.servers:
        text = f"expected one entry for each of {options.servers} servers, got {len(options.server_devices)}"
        yield "options.server_devices", text
    elif options.servers > 1 and not devices and "cpu" not in options.args:
        text = f"expected the GPUs of each of {options.servers} servers, such as '0,1'; got none"
        yield "options.server_devices", text
    elif len(set(devices)) < len(devices):
        twice = next(device for device in devices if devices.count(device) > 1)
        yield "options.server_devices", f"expected each GPU once, got {twice} more than once"


def requirements(
    options: ServerOptions, package: str, page: str, release: Callable[[str, str], Requirement]
) -> Iterator[Requirement]:
    """Checks for a supported release, installed or running. package: the distribution's name. page: the path that
    reports a running server's version. release: judges a key's version."""
    if options.python:
        yield _installed(options.python, package, release)
    elif options.url:
        yield _running(options.url, page, release)


def _installed(python: str, package: str, release: Callable[[str, str], Requirement]) -> Requirement:
    key = "options.python"
    question = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        done = timed_commands.run([python, "-c", question], 10 * ANSWER_S)
    except OSError as error:
        text = f"{python} cannot be started ({error.strerror}); docs/engines.md says how to install {package}"
        return Requirement(key, False, text)
    except subprocess.TimeoutExpired:
        return Requirement(key, False, f"{python} did not answer; expected a Python interpreter")
    if done.returncode:
        return Requirement(key, False, f"{python} has no package {package}; install it (docs/engines.md)")
    return release(key, done.stdout.decode("utf-8", "replace").strip())


def _running(url: str, page: str, release: Callable[[str, str], Requirement]) -> Requirement:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}{page}", timeout=ANSWER_S) as reply:
            version = str(json.load(reply).get("version", "unknown"))
    except (OSError, ValueError, AttributeError) as error:
        return Requirement("options.url", False, f"{url}{page} does not answer ({error}); start the server")
    return release("options.url", version)
