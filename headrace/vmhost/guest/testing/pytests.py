"""Test runs of real packages: pytest in a fork of the slot agent, which has it imported; and any command.

The fork writes a line when tests are collected, when each starts, has an outcome and ends, and the exit code with the
files that fail to import at last. The agent, which no code under test can reach, counts: a report that disagrees with
the lines or with the exit status is none, and a failure that was told is not taken back. Code under test that writes a
report of its own must write the lines too, before pytest writes any.

The result of a command is the JUnit report that its arguments name (``--junitxml=PATH``), otherwise its exit code.
"""

import builtins
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from .. import jobs
from ..files import Answer, Workspace
from ..walks import OperationError
from .observing import Observations

Rows = list[tuple[str, str, str, list[str]]]
_BAD = ("failed", "error")


def available() -> bool:
    """Import pytest, so that every later fork has it. False if it is not installed."""
    try:
        import _pytest.assertion.rewrite
        import pytest
    except ImportError:
        return False
    return bool(pytest and _pytest)


def load() -> None:
    """Run pytest over an empty folder, so that every later fork has it and its plugins imported.

    pytest must import its plugins itself, or it warns that it cannot rewrite their assertions.
    """
    try:
        import pytest
    except ImportError:  # the first run in a sandbox says so
        return
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as null:
        with redirect_stdout(null), redirect_stderr(null):
            pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, folder])
    tempfile.tempdir = None  # a sandbox's environment names its own


class Collector:
    """A pytest plugin that tells the outcomes of tests: of set-up or tear-down that failed, and of the call."""

    def __init__(self, tell: Callable[..., None]) -> None:
        """tell: sends a line to the agent."""
        self._tell = tell
        self.numbers: dict[str, int] = {}
        """Tests in the order in which they were collected, or begun where another process collects them."""
        self.broken: dict[str, str] = {}
        """File that fails to import to its error."""
        self.observations = Observations()
        self.observed: dict[str, list[str]] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        """Part of pytest's plugin protocol."""
        for item in session.items:
            self._number(item.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Part of pytest's plugin protocol."""
        self._tell("started", self._number(nodeid))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Part of pytest's plugin protocol."""
        self._tell("ended", self._number(nodeid), self.observed.pop(nodeid, []))

    def _number(self, nodeid: str) -> int:
        if nodeid not in self.numbers:
            self.numbers[nodeid] = len(self.numbers)
            self._tell("collected", nodeid)
        return self.numbers[nodeid]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Part of pytest's plugin protocol."""
        self.observed.setdefault(report.nodeid, []).extend(self.observations.take())
        if report.failed:
            outcome = "failed" if report.when == "call" else "error"
        elif report.skipped and hasattr(report, "wasxfail"):  # an expected failure, also in set-up, is a pass
            outcome = "passed"
        elif report.skipped or report.when == "call":
            outcome = "skipped" if report.skipped else "passed"
        else:
            return
        # At once: what is kept here, code under test can change.
        self._tell("outcome", self._number(report.nodeid), outcome, _line(report) if report.failed else "")

    def pytest_collectreport(self, report: Any) -> None:
        """Part of pytest's plugin protocol: a file that fails to import is an error of that file."""
        if report.failed:
            self.broken[report.nodeid] = _line(report)


def _line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr)
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return (lines[0 if crash else -1] if lines else "")[:500]


def body(root: str, paths: list[str], environment: dict[str, str], seed: int, become: Callable[[], None]) -> jobs.Body:
    """The body of a job that runs pytest over the paths as the tools' user; its ``report`` stream carries the rows."""

    def run(ends: dict[str, int]) -> None:
        become()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        random.seed(seed)
        _run(root, paths, ends["report"])

    return run


def _forget(folder: str) -> None:
    """Forget the imported modules that a folder has too: the agent imported plugins of pytest, and what they need, from
    elsewhere, and the tests of such a package would run against that copy. The standard library's stay, as in a process
    that has started."""
    names = {entry.removesuffix(".py") for entry in os.listdir(folder)} - {
        "pytest",
        "_pytest",
        *sys.stdlib_module_names,
    }
    for name in [*sys.modules]:
        file = getattr(sys.modules[name], "__file__", None)
        if name.partition(".")[0] in names and file and not file.startswith(folder + "/"):
            del sys.modules[name]


def _run(root: str, paths: list[str], report: int) -> None:
    """In a fork: run pytest over the paths and write rows as JSON to the descriptor. Does not return."""
    import pytest

    os.chdir(root)
    for folder in (f"{root}/src", root):
        if os.path.isdir(folder):
            sys.path.insert(0, folder)
            _forget(folder)

    def tell(*line: object) -> None:
        data = memoryview(json.dumps(line).encode() + b"\n")
        while data:
            data = data[os.write(report, data) :]

    collector = Collector(tell)
    vars(builtins)["__observe__"] = collector.observations.observe
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", *paths]
    code = int(pytest.main(arguments, plugins=[collector]))
    tell("finished", code, list(collector.broken.items()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Miscounted(ValueError):
    """The lines, the report and the exit status of a test process disagree; the text says how."""


def counted(lines: bytes, code: int) -> Rows:
    """The rows of a report that agrees with its lines. code: the exit status. Miscounted, and ValueError, TypeError or
    LookupError for lines that pytest does not write."""
    events = [json.loads(line) for line in lines.split(b"\n")[:-1]]
    report = events.pop() if events and events[-1][0] == "finished" else None
    names: list[str] = []
    running: set[int] = set()
    outcomes: dict[int, tuple[str, str]] = {}
    ended: dict[int, list[str]] = {}
    for event, of, *told in events:
        if event == "collected":
            names.append(str(of))
        elif event == "started" and 0 <= of < len(names) and of not in running:
            running.add(of)
        elif event == "outcome" and (of in running or (0 <= of < len(names) and told[0] == "error")):
            outcome, message = told
            if outcomes.get(of, ("",))[0] not in _BAD:
                outcomes[of] = outcome, message
        elif event == "ended" and of in running:
            running.remove(of)
            ended.setdefault(of, []).extend(*told)
        else:
            raise Miscounted(f"the test process wrote {event} {of} out of turn"[:500])
    if report is None:
        raise Miscounted(f"the test process ended after {len(ended)} of {len(names)} tests, without a report")
    _, exit_code, broken = report
    if exit_code != code:
        raise Miscounted(f"the test process reported exit code {exit_code} and ended with {code}"[:500])
    whole = ended.keys() - running
    if unended := [of for of, (outcome, _) in outcomes.items() if outcome != "error" and of not in whole]:
        raise Miscounted(f"the report has {names[unended[0]]}, which did not end"[:500])
    tests = [(names[of], *outcome, ended.get(of, [])) for of, outcome in outcomes.items()]
    return rows(tests + [(name, "error", message, []) for name, message in broken])


def rows(report: Any) -> Rows:
    """Check rows from an untrusted process. ValueError or TypeError when they are not rows."""
    return [
        (str(name), str(outcome), str(message), [str(text) for text in observed])
        for name, outcome, message, observed in report
    ]


def verdict(rows: Rows) -> dict[str, Any]:
    """The common head of a test answer: ok only if at least one test ran and none failed."""
    bad = sum(outcome in _BAD for _, outcome, *_ in rows)
    error = f"{bad} of {len(rows)} tests failed" if bad else "" if rows else "no tests ran"
    return {"ok": not error, "error": error, "code": 1 if error else 0, "tests": rows}


def outcome(report: bytes, job: jobs.Job) -> Answer:
    """The answer of a finished pytest run."""
    header, bodies = jobs.outcome(job)
    try:
        tests = counted(report, job.code)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        if not job.timed_out:
            why = str(error) if isinstance(error, Miscounted) else "pytest ended without a report"
            header |= {"ok": False, "error": why}
        return header, bodies
    if not job.timed_out:
        header |= verdict(tests) | {"code": job.code}
    return header | {"tests": tests}, bodies


def command_outcome(workspace: Workspace, argv: list[str], job: jobs.Job) -> Answer:
    """The answer of a finished test command."""
    header, bodies = jobs.outcome(job)
    for number, argument in enumerate(argv):
        name, _, path = argument.partition("=")
        if name in ("--junitxml", "--junit-xml"):
            path = path or (argv[number + 1] if number + 1 < len(argv) else "")
            try:
                tests = _junit(workspace.content(path, 16 << 20)[0])
            except (OperationError, ValueError) as error:
                return header | {"ok": False, "error": header["error"] or f"no readable report: {error}"}, bodies
            if job.timed_out:
                return header | {"tests": tests}, bodies
            return header | verdict(tests) | {"code": job.code}, bodies
    passed = not job.code and not job.timed_out
    return header | {"tests": [("command", "passed" if passed else "failed", header["error"], [])]}, bodies


def _junit(data: bytes) -> Rows:
    """Rows of a JUnit report. ValueError when the data is none."""
    from xml.etree import ElementTree

    try:
        cases = list(ElementTree.fromstring(data).iter("testcase"))
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from None
    tests: Rows = []
    for case in cases:
        outcome, message = "passed", ""
        for part in case:
            if part.tag == "skipped" and part.get("type") == "pytest.xfail":
                continue  # an expected failure
            if part.tag in ("failure", "error", "skipped"):
                outcome = {"failure": "failed"}.get(part.tag, part.tag)
                message = (part.get("message") or "").strip().split("\n")[0][:500]
        tests.append((f"{case.get('classname', '')}::{case.get('name', '')}", outcome, message, []))
    return tests
