"""Dockerfiles that run no command: the image that they rest on, and the files that they copy into it."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from headrace.tasks.importing import trees
from headrace.tasks.importing.base import ImportRefused

STILL = frozenset({"FROM", "WORKDIR", "COPY", "ADD", "ENV", "LABEL"})
"""Instructions that need no build."""
_LEFT_OUT = ("Dockerfile", ".dockerignore")
_UNPACKED = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
"""Endings of archives, which ADD unpacks."""


class Instruction(NamedTuple):
    """One instruction of a Dockerfile."""

    name: str
    arguments: str


class Placed(NamedTuple):
    """The image of a Dockerfile without commands."""

    image: str
    """The image that it rests on."""
    workdir: str
    """Empty where it names none."""
    variables: tuple[tuple[str, str], ...]
    files: dict[str, bytes]
    """Absolute paths in the image."""


def read(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, lines that go on joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    words = [line.strip().partition(" ") for line in joined.replace("\t", " ").splitlines() if line.strip()]
    return [Instruction(name.upper(), arguments.strip()) for name, _, arguments in words]


def workdir(instructions: Iterable[Instruction]) -> str:
    """The working directory of the image; empty where the instructions name none."""
    path = ""
    for name, arguments in instructions:
        if name == "WORKDIR":
            path = _absolute(_first(arguments), path)
    return path


def placed(context: Path, where: str, text: str) -> Placed:
    """The image and the files of a Dockerfile of `STILL` instructions. where: its path in an error. ImportRefused."""
    instructions = read(text)
    images = [_words(arguments) for name, arguments in instructions if name == "FROM"]
    if commands := sorted({name for name, _ in instructions} - STILL):
        raise ImportRefused(f"{where} has {commands[0]}, which needs a build: build it (`headrace images build`)")
    if len(images) != 1 or not images[0]:
        raise ImportRefused(f"{where} has {len(images)} stages, expected one FROM with an image")
    if any(name in ("COPY", "ADD") and _foreign(_words(arguments)) for name, arguments in instructions):
        raise ImportRefused(f"{where} copies from another image, which needs a build (`headrace images build`)")
    return Placed(
        next((word for word in images[0] if not word.startswith("--")), ""),
        workdir(instructions),
        tuple(pair for name, arguments in instructions if name == "ENV" for pair in _variables(arguments)),
        copies(context, where, instructions),
    )


def copies(context: Path, where: str, instructions: Iterable[Instruction], default: str = "/") -> dict[str, bytes]:
    """The files that COPY and ADD put into the image, by absolute path. default: the image's own working directory.
    ImportRefused."""
    files: dict[str, bytes] = {}
    folder, folders = default, {default}
    for name, arguments in instructions:
        if name == "WORKDIR":
            folder = _absolute(_first(arguments), folder)
            folders.add(folder)
        if name not in ("COPY", "ADD"):
            continue
        words = _words(arguments)
        if _foreign(words):
            continue  # only a build has it
        *sources, target = [word for word in words if not word.startswith("--")] or [""]
        if not sources:
            raise ImportRefused(f"{where} copies {arguments!r}, expected sources and a target")
        place = _absolute(target, folder)
        into = len(sources) > 1 or target.endswith(("/", "/.")) or target == "." or place in folders
        for source in sources:
            if name == "ADD" and source.endswith(_UNPACKED):
                raise ImportRefused(f"{where} unpacks {source}, which needs a build (`headrace images build`)")
            for path, data in _copied(context, where, source):
                files[_absolute(path, place) if path.startswith("./") or into else place] = data
        folders |= {path.rpartition("/")[0] for path in files}
    return files


def _foreign(words: Iterable[str]) -> bool:
    """Whether COPY takes files of another stage or image."""
    return any(word.startswith("--from") for word in words)


def _copied(context: Path, where: str, source: str) -> Iterator[tuple[str, bytes]]:
    """The files of a source: those of a folder with a path that begins with ``./``, a file with its name."""
    if ".." in source.split("/"):
        raise ImportRefused(f"{where} copies {source}, expected a path below the folder {context.name}")
    pattern = source.strip("/")
    paths = sorted(context.glob(pattern)) if re.search(r"[*?[]", pattern) else [context / pattern]
    if not paths or not all(path.exists() for path in paths):
        raise ImportRefused(f"{where} copies {source}, and the folder {context.name} has no such file")
    for path in paths:
        if path.is_file():
            yield path.name, path.read_bytes()
        for inner, data in trees.read(path).items() if path.is_dir() else ():
            if path != context or inner not in _LEFT_OUT:
                yield f"./{inner}", data


def _words(arguments: str) -> list[str]:
    """The words of an instruction, plain or as a JSON list."""
    try:
        words = json.loads(arguments) if arguments.startswith("[") else shlex.split(arguments)
    except (ValueError, RecursionError):
        return arguments.split()
    return [str(word) for word in words]


def _first(arguments: str) -> str:
    return next(iter(_words(arguments)), "")


def _variables(arguments: str) -> list[tuple[str, str]]:
    """The pairs of ENV, in both of its forms."""
    first, _, rest = arguments.partition(" ")
    if "=" not in first:
        return [(first, rest.strip())]
    pairs = [word.partition("=") for word in _words(arguments)]
    return [(name, value) for name, _, value in pairs]


def _absolute(path: str, folder: str) -> str:
    """A path of an image without dots and double slashes. folder: of a relative one."""
    whole = path if path.startswith("/") else f"{folder}/{path}"
    return "/" + "/".join(part for part in whole.split("/") if part not in ("", "."))
