"""Harbor task folders (task.toml 1.0 to 1.4): instruction, environment, tests, known solution.

The verifier runs in the judge's fresh sandbox and its reward file decides. Harbor mounts tests at /tests and expects
the reward under /logs/verifier. In an image the script does the same; in a template (``--template``) these folders and
the work folder lie in the workspace, and the scripts' text is changed to say so, which the report notes.

A separate verifier gets the declared artifacts and the tests, without the rest of the agent's workspace. Tasks with
steps, several services, GPUs or tools behind MCP are refused by name.
"""

import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import UnsetType

from headrace.messages.tasks import HOST_FOLDER, Grading, Oracle, SandboxLimits, Task, TestPlan
from headrace.tasks.importing import trees
from headrace.tasks.importing.base import (
    Entry,
    ImportOptions,
    ImportRefused,
    Made,
    SourceError,
    clean_id,
    digest,
    limits_of,
    test_seconds,
)

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
TESTS, LOGS, VERIFY = f"{HOST_FOLDER}tests/", f"{HOST_FOLDER}logs/verifier/", f"{HOST_FOLDER}verify.sh"
_COPY = re.compile(r"^\s*(?:COPY|ADD)\s+(?!--from)(?:--\S+\s+)*(\S+)\s+(\S+)\s*$", re.IGNORECASE | re.MULTILINE)
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)\s*$", re.IGNORECASE | re.MULTILINE)
_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)", re.IGNORECASE | re.MULTILINE)
_MISSING = {"gpus": "GPU", "tpu": "TPU", "mcp_servers": "tools behind MCP", "healthcheck": "health check"}
_DISK_MIB = 64 << 10
"""The largest disk of a sandbox (vmhost/node/capacity.py)."""
_SIZES = {"memory": "memory_mib", "memory_mb": "memory_mib", "storage": "disk_mib", "storage_mb": "disk_mib"}
_SERVICES = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")


def read(options: ImportOptions) -> Iterator[Entry]:
    """The task folders in a folder, or the folder itself. SourceError when there is none."""
    root = options.source
    folders = [root] if (root / "task.toml").exists() else sorted(path.parent for path in root.glob("*/task.toml"))
    if not folders:
        raise SourceError(f"{root} has no task.toml, and no folder in it has one; expected Harbor tasks")
    for number, folder in enumerate(folders, 1):
        settings = json.dumps([options.template, options.system, *options.tools]).encode()
        try:
            files = sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
            parts = [part for path in files for part in (os.fsencode(path.relative_to(folder)), _bytes(path))]
        except OSError as error:
            raise SourceError(f"{folder} cannot be read: {error}") from None
        try:
            id = clean_id(folder.resolve().name)
        except ImportRefused:
            id = f"{number:06d}"  # `_made` refuses it
        yield Entry(id, digest(settings, *parts), _maker(folder, options))


def _bytes(path: Path) -> bytes:
    return os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()


def _maker(folder: Path, options: ImportOptions) -> Any:
    return lambda: _made(folder, options)


def _made(folder: Path, options: ImportOptions) -> Made:
    ref, root = options.ref(clean_id(folder.resolve().name)), folder.resolve()
    # A task from elsewhere must not carry this machine's files to the policy.
    if outside := next((path for path in folder.rglob("*") if not _resolved(path).is_relative_to(root)), None):
        raise ImportRefused(f"{outside.relative_to(folder)} is a link out of the task's folder")
    config = _config(folder)
    environment, verifier = _table(config, "environment"), _table(config, "verifier")
    notes = _refuse(folder, config, environment, verifier)
    instruction = folder / "instruction.md"
    if not instruction.is_file() or not (folder / "tests" / "test.sh").is_file():
        raise ImportRefused("expected instruction.md and tests/test.sh")
    dockerfile = folder / "environment" / "Dockerfile"
    docker = _text(dockerfile)
    workdirs = _WORKDIR.findall(docker)
    workdir = str(environment.get("workdir") or (workdirs[-1] if workdirs else "/app"))
    separate = verifier.get("environment_mode", "separate" if "environment" in verifier else "shared") == "separate"
    if separate and "environment" in verifier and not options.template:
        raise ImportRefused("the separate verifier has an image of its own, and a task here has one image")
    where, files = _place(folder, environment, docker, workdir, options)
    mapped = bool(options.template)
    tests = {f"{TESTS}{path}": data for path, data in trees.read(folder / "tests").items()}
    hidden = tests | {VERIFY: _verify(workdir, mapped, _variables(verifier)).encode()}
    timeout = test_seconds("verifier.timeout_sec", verifier.get("timeout_sec", 600.0))
    solve = folder / "solution" / "solve.sh"
    reward = f"{LOGS}reward"
    oracle = Oracle(
        ref=ref,
        hidden=hidden,
        tests=TestPlan(kind="command", argv=("bash", VERIFY), timeout_s=timeout),
        expected=(),
        solution={},
        script=_moved(_text(solve), workdir) if mapped else _text(solve),
        grading=Grading(kind="reward_file", file=reward),
        separate=separate,
    )
    metadata = _table(config, "metadata")
    limits = _limits(config, environment, options, notes)
    task = Task(
        ref=ref,
        family=f"harbor:{metadata.get('category', 'task')}",
        prompt=_moved(_text(instruction), workdir) if mapped else _text(instruction),
        files=files,
        allowed=_artifacts(config, workdir) if separate else ("**",),
        tests=TestPlan(kind="command", argv=("true",)),
        network=_hosts(environment),
        system=options.system,
        tools=options.tools,
        limits=limits,
        **where,
    )
    if mapped:
        notes.append(f"paths {workdir}, /tests and /logs moved into the workspace")
    return Made(task=task, oracle=oracle, notes=tuple(notes))


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = tomllib.loads(_text(folder / "task.toml"))
    except RecursionError:
        raise ImportRefused("task.toml: its lists and tables are nested too deep") from None
    except ValueError as error:  # also of a number with more digits than Python reads
        raise ImportRefused(f"task.toml: {error}") from None
    version = str(config.get("schema_version", config.get("version", "1.0")))
    if version not in VERSIONS:
        raise ImportRefused(f"task.toml has schema {version}; expected one of {', '.join(VERSIONS)}")
    return config


def _table(config: dict[str, Any], key: str) -> dict[str, Any]:
    table = config.get(key, {})
    if not isinstance(table, dict):
        raise ImportRefused(f"task.toml: expected a table [{key}]")
    return table


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise ImportRefused(f"{path.name}: {error}") from None


def _list(table: dict[str, Any], key: str, where: str = "") -> list[Any]:
    value = table.get(key) or []
    if not isinstance(value, list):
        raise ImportRefused(f"task.toml: expected a list {where}{key}, got {value!r:.80}")
    return value


def _refuse(folder: Path, config: dict[str, Any], environment: dict[str, Any], verifier: dict[str, Any]) -> list[str]:
    """Settings that are left out of this task. ImportRefused for one that is not possible here."""
    if steps := _list(config, "steps"):
        raise ImportRefused(f"the task has {len(steps)} steps; a task here has one instruction")
    if services := next((name for name in _SERVICES if (folder / "environment" / name).exists()), ""):
        raise ImportRefused(f"environment/{services}: a task here has one machine")
    for key, what in _MISSING.items():
        if environment.get(key):
            raise ImportRefused(f"environment.{key}: sandboxes here have no {what}")
    if str(environment.get("os", "linux")).lower() != "linux":
        raise ImportRefused(f"environment.os = {environment['os']}: sandboxes here run Linux")
    if verifier.get("collect"):
        raise ImportRefused("verifier.collect: commands between agent and verifier do not run here")
    asked = [f"{table}.user" for table in ("agent", "verifier") if _table(config, table).get("user")]
    if _public(environment):
        asked.append("public network: only listed hosts can be reached")
    return asked


def _limits(
    config: dict[str, Any], environment: dict[str, Any], options: ImportOptions, notes: list[str]
) -> SandboxLimits | UnsetType:
    """The limits of the agent and its machine; what is left out of them goes to the notes. ImportRefused."""
    time_s = _table(config, "agent").get("timeout_sec")
    if options.template:  # the machine is another one than the task's
        notes += [f"environment.{key}" for key in ("cpus", *_SIZES) if key in environment]
        return limits_of({"time_s": time_s})
    sizes: dict[str, int] = {}
    for key, target in _SIZES.items():
        if key in environment:
            sizes[target] = _mib(key, environment[key])
    if sizes.get("disk_mib", 0) > _DISK_MIB:
        notes.append(f"environment.storage: a sandbox's disk has at most {_DISK_MIB} MiB")
        sizes["disk_mib"] = _DISK_MIB
    cpus = environment.get("cpus")
    if isinstance(cpus, float) and math.isfinite(cpus):  # limits_of refuses the others
        cpus = math.ceil(cpus)
    return limits_of({"vcpus": cpus, "time_s": time_s} | sizes)


def _mib(key: str, value: Any) -> int:
    """A size in MiB: a number, or a text such as 2G. ImportRefused."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", str(value), re.IGNORECASE)
    if not match:
        raise ImportRefused(f"environment.{key}: expected a size such as 2048 or 2G, got {value!r:.80}")
    unit = match[2].upper() or "M"
    size = float(match[1]) * 1024.0 ** ("KMGT".index(unit) - 1)
    if not math.isfinite(size):
        raise ImportRefused(f"environment.{key}: expected a size such as 2048 or 2G, got {value!r:.80}")
    return math.ceil(size)


def _public(environment: dict[str, Any]) -> bool:
    if "network_mode" in environment:
        return bool(environment["network_mode"] == "public")
    return bool(environment.get("allow_internet", True))


def _hosts(environment: dict[str, Any]) -> tuple[str, ...]:
    """The listed hosts, at the ports of HTTP."""
    hosts = _list(environment, "allowed_hosts", "environment.")
    return tuple(f"{host}:{port}" for host in hosts for port in (80, 443))


def _place(
    folder: Path, environment: dict[str, Any], docker: str, workdir: str, options: ImportOptions
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Where the task runs, and the files that travel with it. ImportRefused when it can run nowhere."""
    image = str(environment.get("docker_image") or "")
    if options.template:
        return {"template": options.template}, _copied(folder / "environment", docker, workdir)
    if image:
        return {"image": image, "repository": workdir}, {}
    if not docker:
        raise ImportRefused("the task names no docker_image and has no environment/Dockerfile")
    instructions = {line.split()[0].upper() for line in docker.splitlines() if line.strip() and line.strip()[0] != "#"}
    base = _FROM.search(docker)
    if base and instructions <= {"FROM", "WORKDIR", "COPY", "ADD", "ENV", "LABEL"}:
        return {"image": base[1], "repository": workdir}, _copied(folder / "environment", docker, workdir)
    raise ImportRefused(
        "environment/Dockerfile runs commands: build it (`headrace images build`), name the image as "
        "environment.docker_image, or import with --template"
    )


def _copied(context: Path, docker: str, workdir: str) -> dict[str, bytes]:
    """The files that a Dockerfile copies into its work folder."""
    files: dict[str, bytes] = {}
    for source, target in _COPY.findall(docker):
        if ".." in source.split("/"):
            raise ImportRefused(f"environment/Dockerfile copies {source}, expected a path below the folder environment")
        place = target if target.startswith("/") else f"{workdir}/{target}"
        place = re.sub(r"/(?:\./)+|/\.$|//+", "/", place + ("/" if target in (".", "./") else ""))
        if place.rstrip("/") != workdir.rstrip("/") and not place.startswith(f"{workdir.rstrip('/')}/"):
            raise ImportRefused(f"environment/Dockerfile copies to {target}, outside of {workdir}")
        inner = place[len(workdir.rstrip("/")) + 1 :]
        path = context / source.lstrip("/")
        if path.is_dir():
            prefix = f"{inner.rstrip('/')}/" if inner.rstrip("/") else ""
            files |= {
                f"{prefix}{name}": data
                for name, data in trees.read(path).items()
                if name not in ("Dockerfile", ".dockerignore")
            }
        elif path.is_file():
            name = f"{inner}{path.name}" if not inner or inner.endswith("/") else inner
            files[name] = path.read_bytes()
        else:
            raise ImportRefused(f"environment/Dockerfile copies {source}, and the folder environment has no such file")
    return files


def _artifacts(config: dict[str, Any], workdir: str) -> tuple[str, ...]:
    """Globs of the files that a separate verifier gets. ImportRefused without any."""
    globs: list[str] = []
    for entry in _list(config, "artifacts"):
        source = entry.get("source") if isinstance(entry, dict) else entry
        if not isinstance(source, str):
            raise ImportRefused(f"task.toml: expected artifacts that name a path, got {entry!r:.80}")
        inner = source.removeprefix(workdir.rstrip("/") + "/")
        if inner.startswith("/"):
            raise ImportRefused(f"the artifact {source} lies outside of {workdir}")
        globs += [inner, f"{inner.rstrip('/')}/**"]
    if not globs:
        raise ImportRefused("the verifier is separate and the task declares no artifacts, so it would see nothing")
    return tuple(globs)


def _variables(verifier: dict[str, Any]) -> str:
    """Exports of the verifier's variables. ImportRefused for one that the host has to fill in."""
    lines = []
    for name, value in _table(verifier, "env").items():
        if "${" in str(value):
            raise ImportRefused(f"verifier.env.{name} is filled in from the host's environment")
        lines.append(f"export {name}={shlex.quote(str(value))}\n")
    return "".join(lines)


def _moved(text: str, workdir: str) -> str:
    """A text whose paths lie in the workspace, which is the current folder."""
    text = re.sub(rf"(?<![\w./-]){re.escape(workdir.rstrip('/'))}/(?=\w)", "", text)
    return re.sub(rf"(?<![\w./-]){re.escape(workdir.rstrip('/'))}(?![\w/-])", ".", text)


def _text(path: Path) -> str:
    """The text of a file; empty where there is none. ImportRefused for bytes that are no UTF-8."""
    if not path.is_file():  # also a pipe, which may never be written to
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ImportRefused(f"{path.name}: expected UTF-8") from None


def _verify(workdir: str, mapped: bool, variables: str) -> str:
    """The script that runs the verifier and leaves its reward, as text or JSON, at one path."""
    reward = f"{LOGS}reward"
    take = f"cat {{logs}}/reward.json > {reward} 2>/dev/null || cat {{logs}}/reward.txt > {reward} || rm -f {reward}\n"
    head = f"#!/bin/bash\nroot=$PWD\nrm -rf {HOST_FOLDER}logs\nmkdir -p {LOGS}\n{variables}"
    if not mapped:
        inside = "mkdir -p /logs/verifier /tests\nrm -f /logs/verifier/reward.*\n"
        inside += f'cp -r {TESTS}. /tests/\nbash /tests/test.sh\ncd "$root"\n'
        return head + inside + take.format(logs="/logs/verifier")
    # Longest first: the tests' own folder may lie below the work folder.
    moves = [(r"/logs/verifier", f"$root/{LOGS.rstrip('/')}"), (r"/tests", f"$root/{TESTS.rstrip('/')}")]
    moves = [*moves, (re.escape(workdir.rstrip("/")), "$root")]
    edits = " ".join(
        f'-e "s#\\(^\\|[^A-Za-z0-9_./-]\\){old}\\($\\|[^A-Za-z0-9_-]\\)#\\1{new}\\2#g"' for old, new in moves
    )
    inside = f'find {TESTS} -type f -exec sed -i {edits} {{}} +\nbash {TESTS}test.sh\ncd "$root"\n'
    return head + inside + take.format(logs=LOGS.rstrip("/"))
