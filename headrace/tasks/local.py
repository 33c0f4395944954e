"""A sandbox over a dictionary of files. It runs code in this process, so it serves only to make traces fast.

Its results equal those of a real sandbox for the same files (a test compares them), so traces
contain the same texts that a policy later reads in a VM. Only generated code may run here: it has no endless loops and
no side effects.
"""

import builtins
import os
import re
import types
from errno import ENOENT
from functools import lru_cache
from typing import Any

from headrace.messages.sandbox import (
    ListFiles,
    Op,
    OpResult,
    PullTree,
    ReadFile,
    ReplaceLines,
    RunTests,
    Search,
    TestOutcome,
    WriteFiles,
)
from headrace.vmhost.guest import lines as of_files


@lru_cache(8192)
def _compiled(source: bytes, path: str) -> types.CodeType:
    return compile(source, path, "exec", dont_inherit=True)


@lru_cache(256)
def _glob(pattern: str) -> "re.Pattern[str]":
    if "/" not in pattern and pattern != "**":
        pattern = "**/" + pattern
    text = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    return re.compile(text.replace(r"\?", "[^/]"))


class LocalFiles:
    """The Sandbox protocol over `files`. Exec is not offered."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = dict(files)

    async def call(self, op: Op, call_id: str = "") -> OpResult:
        """Run one operation at once; never suspends."""
        match op:
            case ReadFile():
                return OpResult(data=self.files[op.path]) if op.path in self.files else _missing(op.path)
            case WriteFiles():
                self.files.update(op.files)
                for path in op.delete:
                    self.files.pop(path, None)
                return OpResult()
            case ReplaceLines():
                return self._replace(op)
            case ListFiles():
                return OpResult(stdout="\n".join(p for p in sorted(self.files) if _glob(op.pattern).fullmatch(p)))
            case Search():
                return self._search(op)
            case RunTests():
                return self._test(op)
            case PullTree():
                globs = [_glob(pattern) for pattern in op.patterns]
                return OpResult(files={p: d for p, d in self.files.items() if any(g.fullmatch(p) for g in globs)})
        return OpResult(ok=False, error=f"{type(op).__name__} is not offered here")

    def _replace(self, op: ReplaceLines) -> OpResult:
        if op.path not in self.files:
            return _missing(op.path)
        try:
            self.files[op.path] = of_files.replaced(self.files[op.path], op.first, op.last, op.text)
        except of_files.NoSuchLines as refused:
            return OpResult(ok=False, error=f"{op.path} {refused}")
        return OpResult()

    def _search(self, op: Search) -> OpResult:
        pattern, glob = re.compile(op.pattern), _glob(op.glob)
        shown: list[str] = []
        hits = 0
        for path in sorted(self.files):
            if not glob.fullmatch(path):
                continue
            lines = of_files.bodies(self.files[path])
            marks: dict[int, str] = {}
            for number, line in enumerate(lines):
                if pattern.search(line):
                    hits += 1
                    if hits > op.limit:
                        break
                    for near in range(max(0, number - op.context), min(len(lines), number + op.context + 1)):
                        marks.setdefault(near, "-")
                    marks[number] = ":"
            shown += [f"{path}\0{n + 1}{mark}{of_files.shown(lines[n])}" for n, mark in sorted(marks.items())]
            if hits > op.limit:
                break
        return OpResult(stdout="\n".join(shown), truncated=hits > op.limit)

    def _test(self, op: RunTests) -> OpResult:
        """Plain `test_*` functions, with modules that are found in `files` alone."""
        loaded: dict[str, types.ModuleType] = {}

        def load(name: str) -> types.ModuleType:
            if name in loaded:
                return loaded[name]
            stem = name.replace(".", "/")
            for path in (f"{stem}.py", f"{stem}/__init__.py"):
                if path in self.files:
                    module = loaded[name] = types.ModuleType(name)
                    module.__dict__["__builtins__"] = names
                    exec(_compiled(self.files[path], path), module.__dict__)
                    return module
            raise ModuleNotFoundError(name)

        def imported(name: str, _globals: Any = None, _locals: Any = None, only: Any = (), _level: int = 0) -> Any:
            parts = name.split(".")
            modules = [load(".".join(parts[: i + 1])) for i in range(len(parts))]
            return modules[-1] if only else modules[0]

        names = {**vars(builtins), "__import__": imported}
        rows: list[TestOutcome] = []
        for path in op.plan.paths:
            space: dict[str, Any] = {"__builtins__": names}
            try:
                exec(_compiled(self.files[path], path), space)
            except Exception as error:
                rows.append(TestOutcome(path, "error", type(error).__name__))
                continue
            for name, function in space.items():
                if not name.startswith("test_"):
                    continue
                try:
                    function()
                    rows.append(TestOutcome(f"{path}::{name}", "passed"))
                except Exception as error:
                    rows.append(TestOutcome(f"{path}::{name}", "failed", type(error).__name__))
        bad = sum(row.outcome != "passed" for row in rows)
        return OpResult(ok=not bad, error=f"{bad} of {len(rows)} tests failed" if bad else "", tests=tuple(rows))


def _missing(path: str) -> OpResult:
    return OpResult(ok=False, error=f"{path}: {os.strerror(ENOENT)}")
