"""The test process: runs plain ``test_*`` functions in a process that is already warm.

It is forked before it is needed and serves several runs, because under emulation a fork and a fresh import machinery
cost more than the tests. Two things keep a run cheap: an importer that looks for workspace modules only where they can
be (`a/b.py`, `a/b/__init__.py`), and a report made without the traceback module. Modules of the workspace are dropped
after every run, so that the next one loads the files as they are then.

The candidate's code runs in this process, so nothing that it reports is proof. The judge expects certain test names,
brings the test files itself, and runs them in a sandbox of its own.
"""

import builtins
import gc
import io
import os
import random
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType
from typing import Any

from ..frames import Garbage, Reader, pack
from .observing import Observations

OUTPUT_CAP = 16384
"""Bytes of captured output that are reported."""


class Importer:
    """Finds modules of the workspace; the ordinary finders find all others."""

    def __init__(self, root: str) -> None:
        self._roots = (root, root + "/src")
        self.loaded: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Part of the import protocol."""
        stem = name.replace(".", "/")
        for root in self._roots:
            for file, package in ((f"{root}/{stem}.py", False), (f"{root}/{stem}/__init__.py", True)):
                if os.path.isfile(file):
                    spec = ModuleSpec(name, self, origin=file, is_package=package)  # type: ignore[arg-type]
                    spec.has_location = True
                    if package and spec.submodule_search_locations is not None:
                        spec.submodule_search_locations.append(f"{root}/{stem}")
                    return spec
            if os.path.isdir(f"{root}/{stem}") and _has_python(f"{root}/{stem}"):
                spec = ModuleSpec(name, None, is_package=True)
                spec.submodule_search_locations = [f"{root}/{stem}"]
                return spec
        return None

    def ahead(self, name: str) -> None:
        """Load a workspace module and its packages without the import machinery, which costs more than they do."""
        parent = None
        for stop in [at for at, letter in enumerate(name) if letter == "."] + [len(name)]:
            part = name[:stop]
            module = sys.modules.get(part)
            if module is None:
                spec = self.find_spec(part)
                if spec is None or spec.loader is None:
                    return
                module = ModuleType(part)
                module.__spec__, module.__file__, module.__loader__ = spec, spec.origin, spec.loader
                module.__package__ = spec.parent
                if spec.submodule_search_locations is not None:
                    module.__path__ = spec.submodule_search_locations
                sys.modules[part] = module
                try:
                    self.exec_module(module)
                except BaseException:
                    sys.modules.pop(part, None)
                    raise
            if parent is not None:
                setattr(parent, part.rpartition(".")[2], module)
            parent = module

    def create_module(self, spec: ModuleSpec) -> None:
        """Part of the import protocol: the default module object suffices."""

    def exec_module(self, module: ModuleType) -> None:
        """Part of the import protocol."""
        assert module.__spec__ is not None
        file = module.__spec__.origin
        assert file is not None
        self.loaded.append(module.__name__)
        exec(compiled(file), module.__dict__)

    def forget(self) -> None:
        """Drop every module that this importer loaded."""
        for name in self.loaded:
            sys.modules.pop(name, None)
        self.loaded.clear()


def _has_python(folder: str) -> bool:
    try:
        return any(name.endswith(".py") for name in os.listdir(folder))
    except OSError:
        return False


def compiled(file: str) -> CodeType:
    """Compile a file, without reading or writing cached bytecode."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        source = b""
        while piece := os.read(fd, 1 << 20):
            source += piece
    finally:
        os.close(fd)
    return compile(source, file, "exec", dont_inherit=True)


class Capped(io.TextIOBase):
    """Captures printed text: the first OUTPUT_CAP characters."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.left = OUTPUT_CAP

    def writable(self) -> bool:
        """Part of the text protocol."""
        return True

    def write(self, text: str) -> int:
        """Append what the cap allows."""
        if self.left > 0:
            self.text.append(text[: self.left])
            self.left -= len(text)
        return len(text)


def why(error: BaseException, root: str) -> str:
    """A failure in one line: the exception, its innermost line in the workspace, and that line's source."""
    at: TracebackType | None = error.__traceback__
    place = source = ""
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if file.startswith(root + "/"):
            place, number, full = file[len(root) + 1 :], at.tb_lineno, file
        at = at.tb_next
    if place:
        try:
            with open(full, encoding="utf-8", errors="replace") as lines:
                for count, line in enumerate(lines, 1):
                    if count == number:
                        source = line.strip()
                        break
        except OSError:
            pass
        place = f" at {place}:{number}"
    elif isinstance(error, SyntaxError) and error.filename:
        place = f" at {error.filename.removeprefix(root + '/')}:{error.lineno}"
        source = (error.text or "").strip()
    text = str(error.msg if isinstance(error, SyntaxError) else error).strip().replace("\n", " ")
    head = type(error).__name__ + place
    return ": ".join(part for part in (head, source, text) if part)[:500]


def _functions(space: dict[str, Any], file: str) -> list[tuple[str, Callable[[], object]]]:
    """The test functions that the file itself defines, in their order."""
    return [
        (name, value)
        for name, value in space.items()
        if name.startswith("test_") and getattr(getattr(value, "__code__", None), "co_filename", "") == file
    ]


def run(root: str, paths: Sequence[str], importer: Importer) -> list[tuple[str, str, str, list[str]]]:
    """Run the files' test functions. Rows of (``path::function``, outcome, message, observations)."""
    rows: list[tuple[str, str, str, list[str]]] = []
    observations = Observations()
    for path in paths:
        file = f"{root}/{path}"
        module = ModuleType(path.rpartition("/")[2].removesuffix(".py"))
        module.__file__ = file
        module.__dict__["__observe__"] = observations.observe
        try:
            code = compiled(file)
            sys.modules[module.__name__] = module
            importer.loaded.append(module.__name__)
            exec(code, module.__dict__)
            functions = _functions(module.__dict__, file)
            if not functions:
                rows.append((path, "error", "no test functions", []))
        except (Exception, SystemExit) as error:
            rows.append((path, "error", why(error, root), []))
            continue
        for name, function in functions:
            try:
                function()
                outcome, message = "passed", ""
            except (Exception, SystemExit) as error:
                outcome, message = "failed", why(error, root)
            rows.append((f"{path}::{name}", outcome, message, observations.take()))
    return rows


def _run_request(root: str, header: dict[str, Any], importer: Importer) -> bytes:
    """One run; the interpreter's state is restored afterwards as far as Python allows."""
    out = Capped()
    keep = sys.stdout, sys.stderr, sys.path[:], dict(os.environ), dict(vars(builtins)), sys.getrecursionlimit()
    sys.stdout = sys.stderr = out
    random.seed(header["seed"])
    importer.forget()
    try:
        os.chdir(root)
        rows = run(root, header["paths"], importer)
    finally:
        sys.stdout, sys.stderr, sys.path[:], environment, names, limit = keep
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        vars(builtins).update(names)
        sys.setrecursionlimit(limit)
        importer.forget()
    return pack({"tests": rows, "truncated": out.left < 0}, ["".join(out.text).encode("utf-8", "replace")])


def _import_ahead(importer: Importer) -> None:
    """Let `Importer.ahead` load modules that are not loaded yet, before the interpreter's own import searches."""
    ordinary, loaded = builtins.__import__, sys.modules

    def ahead(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
        if level == 0 and name not in loaded:
            importer.ahead(name)
        return ordinary(name, globals, locals, fromlist, level)

    builtins.__import__ = ahead


def serve(channel: socket.socket, root: str) -> None:
    """Answer requests until the agent closes the channel. Runs in a process of its own, under the tools' user."""
    importer = Importer(root)
    sys.meta_path.insert(0, importer)
    _import_ahead(importer)
    reader = Reader()
    gc.freeze()
    while data := channel.recv(65536):
        try:
            frames = reader.feed(data)
        except Garbage:
            return
        for header, _ in frames:
            channel.sendall(_run_request(root, header, importer))
