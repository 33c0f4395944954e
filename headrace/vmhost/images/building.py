"""Builds a Dockerfile into the image store: by buildah, with crun as its runtime.

Both are programs of their own (Debian packages ``buildah`` and ``crun``). buildah keeps its layers under
``<cache>/buildah``, so a second build runs only what changed; the folder may be removed at any time. The commands of a
Dockerfile run in a container under this machine's kernel, as the container's root, with no network unless
`Environment.build_network` says otherwise. buildah itself fetches base images and the addresses of ADD.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from headrace import timed_commands
from headrace.config import Environment
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported
from headrace.vmhost.images.imported import Image, Request

PROGRAM = "buildah"
PROGRAMS = (PROGRAM, "crun")
FILES = ("Dockerfile", "Containerfile")
_KEPT_LINES = 12
"""Lines of the output that an error repeats."""
_LAST_WORDS_S = 10.0
"""Limit for reading the rest of the output: a program that a build left behind may keep it open."""
_CLEAN_S = 120.0
_POLL_S = 0.2
_REGISTRIES = 'unqualified-search-registries = ["docker.io"]\nshort-name-mode = "disabled"\n'
"""So that ``FROM debian:12`` means what it means for docker."""
_ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
"""Namespaces of a build, so that its mounts and programs end with it, also when it is killed."""
_NO_GROUPS = 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"'
"""crun refuses machines with both versions of control groups, even where it is told to make none."""


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a Dockerfile is built."""

    file: str = ""
    """The Dockerfile, if it has another name or place; relative to the context."""
    arguments: tuple[str, ...] = ()
    """``NAME=value`` for its ARG instructions."""
    reference: str = ""
    """The reference by which tasks may name the image; empty: ``NAME:latest``."""
    timeout_s: float = 3600.0
    network: bool = False
    """Whether the commands of the Dockerfile have this machine's network."""
    insecure: tuple[str, ...] = ()
    """Registries (``HOST:PORT``) that may answer without TLS, or with a certificate that nobody signed."""

    @classmethod
    def of(cls, environment: Environment, **settings: Any) -> "BuildOptions":
        """With what a node's configuration says."""
        return cls(network=environment.build_network, insecure=environment.insecure_registries, **settings)


def is_recipe(source: Path) -> bool:
    """Whether this is a Dockerfile or a folder with one, and no image in the OCI layout."""
    if source.is_dir():
        return any((source / name).is_file() for name in FILES) and not (source / "oci-layout").exists()
    return source.is_file() and any(name.lower() in source.name.lower() for name in FILES)


def build(cache: Path, source: Path, request: Request, options: BuildOptions, say: Callable[[str], None]) -> Image:
    """Build a folder with a Dockerfile, or a Dockerfile with its own folder, and store the image. say: gets the output
    line by line. VmhostError with the end of the output."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise VmhostError(
                f"{program} is not installed: apt-get install {program}, or import an image built elsewhere"
            )
    if os.geteuid():
        raise VmhostError(
            "a Dockerfile is built by root alone: run this command as root, or import an image built elsewhere"
        )
    context, file = _source(source, options.file)
    name = request.name or imported.name_of(context.resolve().name)
    reference = options.reference or f"{name}:latest"
    place = cache / "buildah"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        _take(lock, options.timeout_s, say)
        for left in place.glob("output-*"):  # left by a process that died: a live builder would hold the lock
            shutil.rmtree(left, ignore_errors=True)
        making = Path(tempfile.mkdtemp(dir=place, prefix="output-"))
        runner = _Runner(place, making, options, say)
        try:
            network = "host" if options.network else "none"
            words = ["bud", "--isolation", "oci", "--runtime", PROGRAMS[1], "--runtime-flag", "cgroup-manager=disabled"]
            words += ["--network", network, "--pull=false", "--layers", "--tag", reference]
            words += ["--iidfile", str(making / "id")]
            words += [word for argument in options.arguments for word in ("--build-arg", argument)]
            runner.run([*words, "--file", str(file), str(context)])
            runner.run(["push", (making / "id").read_text().strip(), f"oci:{making}/layout:{reference}"])
            return imported.take(cache, making / "layout", name, "", request.memory_mb, str(source))
        finally:
            runner.clean()
            shutil.rmtree(making, ignore_errors=True)


def of_folder(cache: Path, folder: Path, stem: str, options: BuildOptions, say: Callable[[str], None]) -> Image:
    """The image of a folder with a Dockerfile. It is built unless the store has the image of these very files, under
    ``stem`` and a digest. VmhostError, OSError."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        kind = path.lstat().st_mode
        data = os.fsencode(path.readlink()) if stat.S_ISLNK(kind) else path.read_bytes() if stat.S_ISREG(kind) else b""
        for part in (os.fsencode(path.relative_to(folder)), b"%o" % kind, data):
            digest.update(b"%d:" % len(part) + part)
    name = f"{imported.name_of(stem)[:46]}-{digest.hexdigest()[:16]}".lstrip("-")
    stored = imported.find(cache, name)
    return stored or build(cache, folder, Request(name=name), options, say)


def layers(cache: Path) -> list[Path]:
    """Folders with the layers of earlier builds, and what builds left behind."""
    return [path for path in (cache / "buildah").glob("*") if path.name != "lock"]


def forget(cache: Path, dry: bool = False) -> bool:
    """Remove the layers of earlier builds; False while a build uses them. dry: only ask."""
    try:
        lock = (cache / "buildah" / "lock").open("r+")
    except OSError:
        return True
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        for path in () if dry else layers(cache):
            shutil.rmtree(path)
        return True


def _take(lock: IO[str], timeout_s: float, say: Callable[[str], None]) -> None:
    """Wait until no other build uses the layers: each removes what builds left behind. VmhostError."""
    deadline = time.monotonic() + timeout_s
    said = False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise VmhostError(f"another build has used {lock.name} for {timeout_s:g} s: wait for it") from None
            if not said:
                say("headrace: waiting for another build")
            said = True
            time.sleep(_POLL_S)


def _source(source: Path, file: str) -> tuple[Path, Path]:
    """The context and the Dockerfile. VmhostError."""
    if source.is_file() and not file:
        return source.parent, source
    if not source.is_dir():
        raise VmhostError(f"{source} is neither a Dockerfile nor a folder with one")
    dockerfiles = [source / name for name in ((file,) if file else FILES) if (source / name).is_file()]
    if not dockerfiles:
        raise VmhostError(f"{source} has no {file or ' and no '.join(FILES)}: name the file by --file")
    return source, dockerfiles[0]


class _Runner:
    """Runs buildah over the layers of a cache."""

    def __init__(self, place: Path, making: Path, options: BuildOptions, say: Callable[[str], None]) -> None:
        registries = making / "registries.conf"
        insecure = "".join(f'[[registry]]\nlocation = "{name}"\ninsecure = true\n' for name in options.insecure)
        registries.write_text(_REGISTRIES + insecure)
        self._environment = {"CONTAINERS_REGISTRIES_CONF": str(registries)} | os.environ
        driver = (
            "overlay" if "overlay" in Path("/proc/filesystems").read_text().split() else "vfs"
        )  # copies every layer
        places = ("--root", str(place / "store"), "--runroot", str(place / "run"))
        self._head = [*_ALONE, _NO_GROUPS, "sh", PROGRAM, *places, "--storage-driver", driver]
        self._timeout_s, self._say = options.timeout_s, say

    def run(self, words: Sequence[str]) -> None:
        """One command of buildah. VmhostError with the end of its output."""
        process = subprocess.Popen(
            [*self._head, *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        last: deque[str] = deque(maxlen=_KEPT_LINES)
        reader = threading.Thread(target=_read, args=(process.stdout, last, self._say), daemon=True)
        reader.start()
        try:
            code = process.wait(self._timeout_s)
            reader.join(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            said = " | ".join(last)[-900:]
            raise VmhostError(f"{PROGRAM} did not end within {self._timeout_s:g} s (--timeout-s): {said}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code != 0:
            raise VmhostError(f"{PROGRAM} ended with code {code}: {' | '.join(last)[-900:]}")

    def clean(self) -> None:
        """Remove the working containers of builds that failed; finished layers stay."""
        with suppress(subprocess.TimeoutExpired):
            words = [*self._head, "rm", "--all"]
            timed_commands.run(words, _CLEAN_S, env=self._environment)


def _read(output: IO[str], last: deque[str], say: Callable[[str], None]) -> None:
    with output:
        for line in output:
            last.append(line.strip())
            say(line.rstrip())
