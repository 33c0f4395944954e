"""Bundles: a harness with its interpreter, loader and libraries, as one read-only folder named by its content.

A bundle needs nothing of the root that it is mounted in: its interpreter starts through the bundle's own loader, which
finds every library in the bundle. So the same folder runs in a root of Debian, of Alpine, and without any distribution.
A bundle is made once (`headrace harness`), with the package managers of this machine; a node mounts what its cache
holds and makes nothing.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace.config import Program
from headrace.errors import MACHINE, HeadraceError
from headrace.python_modules import module_command

FOLDER = "harnesses"
"""Below `[environment] cache_dir`."""
MANIFEST = "bundle.json"
_LIBRARY = re.compile(r"(?:\S+ => )?(/\S+) \(0x")
_LEFT_OUT = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "site-packages", "__pycache__")


class BundleError(HeadraceError, exit_status=MACHINE):
    """A bundle could not be made, or is not there."""


class Bundle(NamedTuple):
    """A bundle in a node's cache."""

    digest: str
    folder: Path
    runners: dict[str, list[str]]
    """The words that start each of its programs, with `{bundle}` for the folder in which it is mounted."""

    def mounted(self, folder: str) -> dict[str, tuple[str, ...]]:
        """The runners in a sandbox that has the bundle in this folder."""
        return {name: tuple(word.replace("{bundle}", folder) for word in words) for name, words in self.runners.items()}


def find(cache: Path, program: Program) -> Bundle | None:
    """The bundle of a program in a cache; None if none was made."""
    try:
        digest = (cache / FOLDER / f"{_name(program)}.digest").read_text().strip()
        manifest = json.loads((cache / FOLDER / digest / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    return Bundle(digest, cache / FOLDER / digest, manifest["runners"])


def make(cache: Path, program: Program) -> Bundle:
    """Make a program's bundle, or find it. A folder's bundle is made again, because the folder may have changed.
    BundleError."""
    if (found := find(cache, program)) is not None and not program.install.startswith("folder:"):
        return found
    root = cache / FOLDER
    part = root / f".{_name(program)}.{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        kind, _, wanted = program.install.partition(":")
        match kind:
            case "pip":
                started = _python(part, wanted.split())
            case "npm":
                started = _node(part, wanted.split())
            case "folder":
                shutil.copytree(wanted, part, symlinks=True, dirs_exist_ok=True)
                started = _programs(part, part / "bin")
            case _:
                raise BundleError(f"install: expected pip:, npm: or folder:, got {program.install!r:.80}")
        (part / MANIFEST).write_text(json.dumps({"runners": started}, sort_keys=True))
        digest = _sealed(part)
        if not (root / digest).exists():
            part.rename(root / digest)
        (root / f"{_name(program)}.digest").write_text(digest)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        raise BundleError(f"{program.install}: the bundle could not be made: {told[-2000:]}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    made = find(cache, program)
    assert made is not None
    return made


def _name(program: Program) -> str:
    return hashlib.sha256(f"{program.install} {sys.version}".encode()).hexdigest()[:24]


def _run(*words: str) -> str:
    done = subprocess.run(words, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout


def _python(part: Path, requirements: list[str]) -> dict[str, list[str]]:
    """This machine's Python with the requirements installed. The programs: `python`, and every script of theirs."""
    base, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = part / "lib" / version
    ignored = shutil.ignore_patterns(*_LEFT_OUT, "config-*", "*.a")
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=ignored, symlinks=True)
    (part / "bin").mkdir()
    shutil.copy2(base / "bin" / version, part / "bin" / version)
    site = library / "site-packages"
    if requirements:
        _run(*module_command("pip", "install", "-q", "--no-compile", "--target", str(site), *requirements))
    shutil.rmtree(site / "bin", ignore_errors=True)
    # Compiled files that name no time: the same content has the same name, and nothing compiles again.
    compiling = ("compileall", "-q", "-j", "2", "--invalidation-mode", "unchecked-hash", str(library))
    subprocess.run(module_command(*compiling), check=False, capture_output=True)
    loader = _with_libraries(part)
    return {"python": [*loader, f"{{bundle}}/bin/{version}", "-sP"]}


def _node(part: Path, requirements: list[str]) -> dict[str, list[str]]:
    """This machine's Node with the requirements installed. The programs: `node`, and every program of theirs."""
    node = shutil.which("node")
    if node is None:
        raise BundleError("the bundle needs Node: install it on the machine that makes the bundle")
    (part / "bin").mkdir()
    shutil.copy2(Path(node).resolve(), part / "bin" / "node")
    _run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(part), *requirements)
    return _programs(part, part / "node_modules" / ".bin")


def _programs(part: Path, folder: Path) -> dict[str, list[str]]:
    """How each program of a folder is started."""
    loader = _with_libraries(part)
    found = {"node": [*loader, "{bundle}/bin/node"]} if (part / "bin" / "node").exists() else {}
    for link in sorted(folder.iterdir()):
        file = link.resolve()
        inside = f"{{bundle}}/{file.relative_to(part.resolve())}"
        head = file.read_bytes()[:256]
        if b"node" in head.partition(b"\n")[0] and head.startswith(b"#!"):
            found[link.name] = [*found["node"], inside]
        else:  # of a compiler that puts the program's own data behind it: it must be started itself
            found[link.name] = [inside]
    return found


def _with_libraries(part: Path) -> list[str]:
    """Copy the libraries that the bundle's binaries need from this machine; the words that start its loader."""
    place = part / "lib"
    place.mkdir(exist_ok=True)
    binaries = [str(file) for file in _files(part) if _is_elf(file)]
    needed: set[str] = set()
    for at in range(0, len(binaries), 200):
        told = subprocess.run(("ldd", *binaries[at : at + 200]), check=False, capture_output=True, text=True)
        needed |= set(_LIBRARY.findall(told.stdout))
    loader = ""
    for library in sorted(needed):
        if Path(library).resolve().is_relative_to(part.resolve()):
            continue
        name = Path(library).name
        loader = name if name.startswith("ld-") else loader
        if not (place / name).exists():
            shutil.copy2(Path(library).resolve(), place / name)
    return [f"{{bundle}}/lib/{loader}", "--library-path", "{bundle}/lib"] if loader else []


def _files(part: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(part):
        for name in names:
            file = Path(folder, name)
            if not file.is_symlink():
                yield file


def _is_elf(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4) == b"\x7fELF"


def _sealed(part: Path) -> str:
    """Take the rights to write from a bundle; the hash of its paths, modes, links and contents."""
    told = hashlib.sha256()
    for folder, folders, names in os.walk(part, topdown=True):
        folders.sort()
        for name in sorted((*names, *(each for each in folders if Path(folder, each).is_symlink()))):
            path = Path(folder, name)
            inside = path.relative_to(part)
            if path.is_symlink():
                told.update(f"link {inside} {os.readlink(path)}\n".encode())
                continue
            mode = 0o555 if path.stat().st_mode & stat.S_IXUSR else 0o444
            path.chmod(mode)
            with path.open("rb") as file:
                told.update(f"file {inside} {mode:o} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return told.hexdigest()
