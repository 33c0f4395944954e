"""Dockerfiles that run no command: the image that they rest on, and the files that they copy into it."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.messages.tasks import Change
from headrace.tasks.importing import trees
from headrace.tasks.importing.base import ImportRefused
from headrace.tasks.importing.trees import Tree

STILL = frozenset({"FROM", "WORKDIR", "COPY", "ADD", "ENV", "LABEL"})
"""Instructions that need no build."""
_LEFT_OUT = ("Dockerfile", ".dockerignore")
_UNPACKED = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
"""Endings of archives, which ADD unpacks."""
_VARIABLE = re.compile(r"\\(.)|\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")
"""A character after a backslash, or a variable: ``$A``, ``${A}``, ``${A:-other}``, ``${A:+other}``."""
_HEREDOC = re.compile(r"<<-?([\"']?)(\w+)\1")


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
    tree: Tree
    """Absolute paths in the image."""


def read(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, lines that go on joined, without the lines that a command gets as its input."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    instructions: list[Instruction] = []
    ends: list[str] = []
    for line in joined.replace("\t", " ").splitlines():
        if ends:
            if line.strip() == ends[0]:
                ends.pop(0)
            continue
        name, _, arguments = line.strip().partition(" ")
        if name.upper() in ("RUN", "COPY", "ADD"):
            ends = [word for _, word in _HEREDOC.findall(arguments)]
        if name:
            instructions.append(Instruction(name.upper(), arguments.strip()))
    return instructions


def last_image(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The instructions that make the last image, those of the stages that it rests on before its own."""
    stages: list[list[Instruction]] = []
    names: dict[str, int] = {}
    defaults: dict[str, str] = {}
    for instruction in instructions:
        if instruction.name == "ARG" and not stages:
            defaults |= {word.partition("=")[0]: word for word in _words(instruction.arguments)}
        if instruction.name == "ARG":
            words = [defaults.get(word, word) for word in _words(instruction.arguments)]
            instruction = Instruction("ARG", shlex.join(words))
        if instruction.name == "FROM":
            words = [word for word in _words(instruction.arguments) if not word.startswith("--")]
            base = names.get(words[0].lower()) if words else None
            stages.append([*stages[base]] if base is not None else [instruction])
            if len(words) == 3 and words[1].upper() == "AS":
                names[words[2].lower()] = len(stages) - 1
        elif stages:
            stages[-1].append(instruction)
    return stages[-1] if stages else []


def workdir(instructions: Sequence[Instruction], where: str) -> str:
    """The working directory of the last image; empty where the instructions name none. where: the Dockerfile's path in
    an error. ImportRefused for a folder that only a build knows."""
    path = ""
    variables: dict[str, str] = {}
    for name, arguments in last_image(instructions):
        _define(variables, name, arguments)
        if name == "WORKDIR":
            path = _absolute(_expanded(_folder(arguments), variables, where), path)
    return path


def placed(context: Path, where: str, text: str) -> Placed:
    """The image and the files of a Dockerfile of `STILL` instructions. where: its path in an error. ImportRefused."""
    instructions = read(text)
    images = [_words(arguments) for name, arguments in instructions if name == "FROM"]
    if commands := sorted({name for name, _ in instructions} - STILL):
        raise ImportRefused(f"{where} has {commands[0]}, which needs a build: build it (`headrace images`)")
    if len(images) != 1 or not images[0]:
        raise ImportRefused(f"{where} has {len(images)} stages, expected one FROM with an image")
    if any(name in ("COPY", "ADD") and _foreign(_words(arguments)) for name, arguments in instructions):
        raise ImportRefused(f"{where} copies from another image, which needs a build (`headrace images`)")
    return Placed(
        next((word for word in images[0] if not word.startswith("--")), ""),
        workdir(instructions, where),
        tuple(pair for name, arguments in instructions if name == "ENV" for pair in _variables(arguments)),
        copies(context, where, instructions),
    )


def copies(context: Path, where: str, instructions: Sequence[Instruction], default: str = "/") -> Tree:
    """The files that COPY and ADD put into the last image, by absolute path. default: the image's own working
    directory. ImportRefused."""
    made = Tree({}, {})
    folder, folders = default, {default}
    variables: dict[str, str] = {}
    for name, arguments in last_image(instructions):
        _define(variables, name, arguments)
        if name == "WORKDIR":
            folder = _absolute(_expanded(_folder(arguments), variables, where), folder)
            folders.add(folder)
        if name not in ("COPY", "ADD"):
            continue
        words = _words(arguments)
        if _foreign(words):
            continue  # only a build has it
        *sources, target = [_expanded(word, variables, where) for word in words if not word.startswith("--")] or [""]
        if not sources:
            raise ImportRefused(f"{where} copies {arguments!r}, expected sources and a target")
        if any(word.startswith("<<") for word in sources):
            raise ImportRefused(f"{where} copies text of its own, which needs a build (`headrace images`)")
        place = _absolute(target, folder)
        into = len(sources) > 1 or target.endswith(("/", "/.")) or target == "." or place in folders
        for source in sources:
            if name == "ADD" and source.endswith(_UNPACKED):
                raise ImportRefused(f"{where} unpacks {source}, which needs a build (`headrace images`)")
            for path, is_file, tree in _copied(context, where, source):
                prefix = place if is_file and not into else _absolute(path, place)
                made = _with_mode(_moved(tree, prefix), words, where).over(made)
        folders |= {path.rpartition("/")[0] for path in (*made.files, *made.entries)}
    return made


def _moved(tree: Tree, prefix: str) -> Tree:
    """The tree of one file, whose path is empty, or of a folder, at an absolute path."""
    if "" in tree.files:
        entries = {prefix: Change(prefix, "file", 0o755)} if tree.entries else {}
        return Tree({prefix: tree.files[""]}, entries, tree.notes)
    return tree.below(f"{prefix.rstrip('/')}/")


def _with_mode(tree: Tree, words: Sequence[str], where: str) -> Tree:
    """The tree with the mode of an option ``--chmod``, as far as it lets files be executed."""
    mode = next((word.partition("=")[2] for word in words if word.startswith("--chmod=")), "")
    if not mode:
        return tree
    if not re.fullmatch(r"[0-7]{3,4}", mode):
        raise ImportRefused(f"{where} copies with --chmod={mode}, expected an octal mode such as 755")
    others = {path: entry for path, entry in tree.entries.items() if entry.kind != "file"}
    programs = {path: Change(path, "file", 0o755) for path in tree.files} if int(mode, 8) & 0o100 else {}
    return Tree(tree.files, others | programs, tree.notes)


def _foreign(words: Iterable[str]) -> bool:
    """Whether COPY takes files of another stage or image."""
    return any(word.startswith("--from") for word in words)


def _copied(context: Path, where: str, source: str) -> Iterator[tuple[str, bool, Tree]]:
    """The files of a source: the content of a folder for the place itself, and a file with its name."""
    if ".." in source.split("/"):
        raise ImportRefused(f"{where} copies {source}, expected a path below the folder {context.name}")
    pattern = source.strip("/")
    paths = sorted(context.glob(pattern)) if re.search(r"[*?[]", pattern) else [context / pattern]
    if not paths or not all(path.exists() for path in paths):
        raise ImportRefused(f"{where} copies {source}, and the folder {context.name} has no such file")
    for path in paths:
        if path.is_file():
            entries = {"": Change("", "file", 0o755)} if path.stat().st_mode & 0o100 else {}
            yield path.name, True, Tree({"": path.read_bytes()}, entries)
        elif path.is_dir():
            tree = trees.read(path)
            if path == context:
                for name in _LEFT_OUT:
                    tree.files.pop(name, None)
                    tree.entries.pop(name, None)
            yield ".", False, tree


def _words(arguments: str) -> list[str]:
    """The words of an instruction, plain or as a JSON list."""
    try:
        words = json.loads(arguments) if arguments.startswith("[") else shlex.split(arguments)
    except (ValueError, RecursionError):
        return arguments.split()
    return [str(word) for word in words]


def _folder(arguments: str) -> str:
    """The folder of WORKDIR, which is the rest of its line."""
    return arguments[1:-1] if re.fullmatch(r"\"[^\"]*\"|'[^']*'", arguments) else arguments


def _define(variables: dict[str, str], name: str, arguments: str) -> None:
    """Note the variables that an instruction sets; a value that names an unknown one is unknown too."""
    if name == "FROM":
        variables.clear()
    if name == "ENV":
        earlier = dict(variables)  # a pair does not see the others of its instruction
        for key, value in _variables(arguments):
            _set(variables, key, value, earlier)
    if name == "ARG":
        for word in _words(arguments):
            key, equals, value = word.partition("=")
            if equals:
                _set(variables, key, value, variables)


def _set(variables: dict[str, str], key: str, value: str, earlier: dict[str, str]) -> None:
    try:
        variables[key] = _expanded(value, earlier, "")
    except ImportRefused:
        variables.pop(key, None)


def _expanded(text: str, variables: dict[str, str], where: str) -> str:
    """The text with its variables' values. ImportRefused for a variable that the Dockerfile does not set."""

    def value(match: "re.Match[str]") -> str:
        if match[1]:
            return match[1]
        name = match[2] or match[3]
        if match[4]:
            return variables.get(name) or match[5] if match[4] == "-" else match[5] if variables.get(name) else ""
        if name not in variables:
            raise ImportRefused(f"{where} uses ${name}, which it does not set; name the folder as environment.workdir")
        return variables[name]

    return _VARIABLE.sub(value, text)


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
