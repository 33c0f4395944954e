"""Makes ten SWE-bench rows and eight Harbor folders out of packages of PyPI, with an image for each:

    python -m tests.support.image_rows FOLDER

A row is a released package with one fault put in, committed in an image; its patch restores the release. As
for SWE-bench, the named tests are those that the release passes: with the fault the ones of FAIL_TO_PASS fail and the
ones of PASS_TO_PASS pass. Their names are read from the logs of two runs of the package's own tests on this machine.
The images rest on one layer of Debian packages. Needs pip, mmdebstrap, git, and their networks.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.images import Layers, tar_of
from headrace.judging.logs.registry import parse
from headrace.tasks.packages.fetch import unpack
from headrace.vmhost.images import packages

DEBIAN = ("python3", "python3-pytest", "git", "bash", "dash", "coreutils", "findutils", "grep", "sed", "tar")
BASE = "headrace.example/base:1"
PYTEST = "python -m pytest -rA -p no:cacheprovider"


class Fault(NamedTuple):
    """One fault in a release."""

    id: str
    release: str
    repo: str
    file: str
    right: str
    """Text of the release; empty: the fault is the file itself, and its repair removes it."""
    wrong: str
    tests: str
    shape: str
    """Of the row: ``old``, ``unnamed`` (old, with the image's default name), or ``5``."""
    prompt: str
    failing: str = ""
    """A test that fails before and after the repair."""


KNOWN_FAILURE = (
    '\n\ndef test_a_plural_that_is_not_supported():\n    assert inflection.pluralize("criterion") == "criteria"\n'
)
FAULTS = (
    Fault("toolz__toolz-1", "toolz==0.12.1", "pytoolz/toolz", "toolz/itertoolz.py", "islice(seq, 0, None, n)",
          "islice(seq, 1, None, n)", "toolz/tests/test_itertoolz.py", "old",
          "take_nth must begin with the first item."),
    Fault("toolz__toolz-2", "toolz==0.12.1", "pytoolz/toolz", "toolz/itertoolz.py",
          "    inposed = concat(zip(itertools.repeat(el), seq))\n    next(inposed)\n    return inposed\n",
          "    return concat(zip(itertools.repeat(el), seq))\n", "toolz/tests/test_itertoolz.py", "5",
          "interpose puts the element before the first item as well."),
    Fault("toolz__toolz-3", "toolz==0.12.1", "pytoolz/toolz", "toolz/functoolz.py",
          "from importlib import import_module\n", "", "toolz/tests/test_serialization.py", "5",
          "Curried functions cannot be pickled: NameError: import_module."),
    Fault("inflection__inflection-1", "inflection==0.5.1", "jpvanhal/inflection", "inflection/__init__.py",
          "in (11, 12, 13)", "in (11, 12)", "test_inflection.py", "old", "ordinal(13) must be th.", KNOWN_FAILURE),
    Fault("inflection__inflection-2", "inflection==0.5.1", "jpvanhal/inflection", "inflection/__init__.py",
          "return word.replace('_', '-')", "return word", "test_inflection.py", "5",
          "dasherize leaves underscores where they are."),
    Fault("boltons__boltons-1", "boltons==24.0.0", "mahmoud/boltons", "boltons/mathutils.py",
          "min(max(x, lower), upper)", "max(x, lower)", "tests/test_mathutils.py", "unnamed",
          "clamp ignores its upper bound."),
    Fault("boltons__boltons-2", "boltons==24.0.0", "mahmoud/boltons", "boltons/mathutils/__init__.py", "",
          '"""Left from a refactoring."""\n', "tests/test_mathutils.py", "5",
          "boltons/mathutils/ hides boltons/mathutils.py; it was left from a refactoring."),
    Fault("boltons__boltons-3", "boltons==24.0.0", "mahmoud/boltons", "boltons/strutils.py",
          "max(range_limits)+1", "max(range_limits)", "tests/test_strutils.py", "old",
          "parse_int_list leaves out the last number of a range."),
    Fault("parse__parse-1", "parse==1.20.2", "r1chardj0n3s/parse", "parse.py", "return float(string[:-1]) / 100.0",
          "return float(string[:-1])", "tests/test_parse.py", "5", "{:%} must give a share, so 0.5 for 50%."),
    Fault("parse__parse-2", "parse==1.20.2", "r1chardj0n3s/parse", "parse.py",
          "return name in self.named", "return name in self.fixed", "tests/test_result.py", "old",
          "A named field is not found by the operator in."),
)  # fmt: skip


def run(*words: str, cwd: Path | None = None) -> str:
    """The output of a command that must succeed."""
    return subprocess.run(words, cwd=cwd, check=True, capture_output=True, text=True).stdout


class Maker:
    """Rows and images below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = Path(tempfile.mkdtemp(dir=folder, prefix="work-"))
        self.layout = Layers(folder / "layout")
        self.base: list[dict[str, Any]] = []
        self.images: list[tuple[str, list[dict[str, Any]], str]] = []

    def base_layers(self) -> None:
        """Debian's packages, and ``python`` beside ``python3``."""
        packages.download(self.work / "base.tar", DEBIAN, "--variant=extract")
        tree = self.work / "python"
        (tree / "bin").mkdir(parents=True)
        (tree / "bin" / "python").symlink_to("/usr/bin/python3")
        python_layer = self.layout.layer(tar_of(tree, "usr/local", self.work / "python.tar"))
        self.base = [self.layout.layer(self.work / "base.tar"), python_layer]
        context = self.folder / "base"
        context.mkdir()
        for number, layer in enumerate(self.base):
            digest = layer["digest"].removeprefix("sha256:")
            os.link(self.layout.folder / "blobs" / "sha256" / digest, context / f"{number}.tar")
        (context / "Dockerfile").write_text("FROM scratch\nADD 0.tar 1.tar /\nWORKDIR /testbed\n")

    def image(self, tag: str, tree: Path, prefix: str) -> None:
        """An image of the base and one folder, which is its work folder."""
        own = self.layout.layer(tar_of(tree, prefix, self.work / "own.tar"))
        self.images.append((tag, [*self.base, own], f"/{prefix}"))

    def write_images(self) -> None:
        """One OCI layout with all images."""
        manifests = []
        for tag, layers, workdir in self.images:
            self.layout.image(layers, workdir)
            (manifest,) = json.loads((self.layout.folder / "index.json").read_text())["manifests"]
            manifests.append(manifest | {"annotations": {"org.opencontainers.image.ref.name": tag}})
        (self.layout.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
        (self.folder / "tags").write_text("".join(f"{tag}\n" for tag, *_ in self.images))

    def unpacked(self, release: str, name: str) -> Path:
        """The files of a release's source archive."""
        sdists = self.work / "sdists"
        pip = (
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
        )
        wanted = release.replace("==", "-")
        if not list(sdists.glob(f"{wanted}.tar.gz")):
            run(*pip, "-d", str(sdists), release)
        return unpack(sdists / f"{wanted}.tar.gz", self.work / name)

    def row(self, fault: Fault) -> dict[str, Any]:
        """A row, and its image."""
        tree = self.unpacked(fault.release, fault.id)
        test, file = tree / fault.tests, tree / fault.file
        whole = test.read_text() + fault.failing
        test.write_text(whole)
        after = self.outcomes(tree, fault.tests)
        release = file.read_text() if fault.right else ""
        assert release.count(fault.right) == 1 if fault.right else not file.exists(), fault.id
        file.parent.mkdir(exist_ok=True)
        file.write_text(release.replace(fault.right, fault.wrong) if fault.right else fault.wrong)
        before = self.outcomes(tree, fault.tests)
        passes = [name for name, outcome in after.items() if outcome == "passed"]
        to_pass = [name for name in passes if before.get(name) != "passed"]
        assert to_pass and (len(passes) < len(after)) == bool(fault.failing), fault.id
        cut = {name.split("::")[-1].partition("[")[0] for name in to_pass}
        test.write_text(without(test.read_text().removesuffix(fault.failing), cut))
        commit = self.commit(tree)
        self.image(self.tag(fault), tree, "testbed")
        test.write_text(whole)
        test_patch = run("git", "diff", "HEAD", "--", fault.tests, cwd=tree)
        run("git", "checkout", "-q", "--", fault.tests, cwd=tree)
        if fault.right:
            file.write_text(release)
        else:
            file.unlink()
        patch = run("git", "diff", "HEAD", cwd=tree)
        row: dict[str, Any] = {
            "instance_id": fault.id,
            "repo": fault.repo,
            "base_commit": commit,
            "problem_statement": fault.prompt,
            "patch": patch,
            "test_patch": test_patch,
            "FAIL_TO_PASS": json.dumps(to_pass),
            "PASS_TO_PASS": json.dumps([name for name in passes if name not in to_pass]),
        }
        if fault.shape == "old":
            row["image_name"] = self.tag(fault)
        if fault.shape == "5":
            row |= {"image": self.tag(fault), "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}
            row["FAIL_TO_PASS"], row["PASS_TO_PASS"] = to_pass, json.loads(row["PASS_TO_PASS"])
            row["eval_script"] = eval_script(commit, fault.tests, test_patch)
        return row

    def tag(self, fault: Fault) -> str:
        """The reference of a row's image."""
        if fault.shape == "unnamed":
            return f"docker.io/swebench/sweb.eval.x86_64.{fault.id.replace('__', '_1776_')}:latest"
        return f"headrace.example/{fault.id.replace('__', '-')}:1"

    def commit(self, tree: Path) -> str:
        """Make the tree a repository with one commit."""
        git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        for words in (("init", "-q"), ("add", "-A", "-f"), ("commit", "-qm", "release")):
            run(*git, *words, cwd=tree)
        return run("git", "rev-parse", "HEAD", cwd=tree).strip()

    def outcomes(self, tree: Path, tests: str) -> dict[str, Any]:
        """The outcomes in a log of the tests, run on this machine."""
        words = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--noconftest", tests]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        done = subprocess.run(
            words, cwd=tree, capture_output=True, text=True, env=clean | {"PYTHONDONTWRITEBYTECODE": "1"}
        )
        return dict(parse("pytest", done.stdout))


def without(source: str, names: set[str]) -> str:
    """A test module without these functions."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1
            assert node.end_lineno is not None
            lines[first : node.end_lineno] = ["\n"] * (node.end_lineno - first)
    return "".join(lines).rstrip() + "\n"


def eval_script(commit: str, tests: str, patch: str) -> str:
    """A row's script as swebench 5.x writes it."""
    return f"""#!/bin/bash
set -uxo pipefail
cd /testbed
git config --global --add safe.directory /testbed
git checkout {commit} {tests}
git apply -v - <<'EOF_114329324912'
{patch}EOF_114329324912
: '>>>>> Start Test Output'
{PYTEST} {tests}
code=$?
: '>>>>> End Test Output'
echo ">>>>> Test Exit Code: $code"
git checkout {commit} {tests}
"""


HARBOR: dict[str, dict[str, str]] = {
    "write-file": {
        "task.toml": 'version = "1.0"\n[environment]\ndocker_image = "headrace.example/app:1"\n',
        "instruction.md": "Write 42 to /app/out.txt.",
        "solution/solve.sh": "echo 42 > /app/out.txt\n",
        "tests/test.sh": 'grep -qx 42 /app/out.txt && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
    },
    "repair-module": {
        "task.toml": 'schema_version = "1.1"\n[metadata]\ncategory = "python"\n[environment]\nmemory_mb = 512\n',
        "instruction.md": "add in /app/calc.py subtracts. Repair it.",
        "environment/Dockerfile": "FROM headrace.example/base:1\nWORKDIR /app\nCOPY calc.py .\n",
        "environment/calc.py": "def add(a, b):\n    return a - b\n",
        "solution/solve.sh": "sed -i 's/a - b/a + b/' /app/calc.py\n",
        "tests/test.sh": "cd /app && python -m pytest -q -p no:cacheprovider /tests/test_calc.py && r=1 || r=0\n"
        "echo $r > /logs/verifier/reward.txt\n",
        "tests/test_calc.py": "import sys\n\nsys.path.insert(0, '/app')\nimport calc\n\n\n"
        "def test_add():\n    assert calc.add(2, 3) == 5\n",
    },
    "json-reward": {
        "task.toml": 'schema_version = "1.2"\n[environment]\ndocker_image = "headrace.example/app:1"\n'
        'workdir = "/app"\n',
        "instruction.md": "Sort /app/words.txt into /app/sorted.txt.",
        "solution/solve.sh": "sort words.txt > sorted.txt\n",
        "tests/test.sh": '[ "$(sort /app/words.txt)" = "$(cat /app/sorted.txt)" ] && r=1.0 || r=0.0\n'
        'echo "{\\"reward\\": $r}" > /logs/verifier/reward.json\n',
    },
    "separate-verifier": {
        "task.toml": 'schema_version = "1.4"\nartifacts = ["/app/result.json"]\n'
        '[environment]\ndocker_image = "headrace.example/app:1"\n[verifier]\nenvironment_mode = "separate"\n',
        "instruction.md": "Count the words of /app/words.txt: write {\"words\": N} to /app/result.json.",
        "solution/solve.sh": "echo left > /app/scratch\n"
        'echo "{\\"words\\": $(wc -w < /app/words.txt)}" > /app/result.json\n',
        "tests/test.sh": "[ ! -e /app/scratch ] && grep -q '\"words\": 4' /app/result.json && r=1 || r=0\n"
        "echo $r > /logs/verifier/reward.txt\n",
    },
    "outside": {
        "task.toml": 'version = "1.0"\n[environment]\ndocker_image = "headrace.example/app:1"\nworkdir = "/app"\n',
        "instruction.md": "Write hello to /etc/greeting.",
        "solution/solve.sh": "echo hello > /etc/greeting\n",
        "tests/test.sh": 'grep -qx hello /etc/greeting && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
    },
    "with-variables": {
        "task.toml": 'schema_version = "1.3"\n[environment]\ndocker_image = "headrace.example/app:1"\n'
        'workdir = "/app"\ncpus = 1\n[verifier]\ntimeout_sec = 300.0\n[verifier.env]\nWANTED = "delta"\n',
        "instruction.md": "Write the last word of /app/words.txt to /app/last.txt.",
        "solution/solve.sh": "tail -n 1 words.txt > last.txt\n",
        "tests/test.sh": '[ "$(cat /app/last.txt)" = "$WANTED" ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
    },
    "with-steps": {
        "task.toml": 'schema_version = "1.4"\n[environment]\ndocker_image = "headrace.example/app:1"\n'
        'workdir = "/app"\n[[steps]]\nname = "sort"\nmin_reward = 1.0\n[[steps]]\nname = "join"\n',
        "steps/sort/instruction.md": "Sort /app/words.txt into /app/sorted.txt.",
        "steps/sort/solution/solve.sh": "sort words.txt > sorted.txt\n",
        "steps/sort/tests/test.sh": 'sort -c /app/sorted.txt && [ ! -e /app/end.txt ] && r=1 || r=0\n'
        "echo $r > /logs/verifier/reward.txt\n",
        "steps/join/instruction.md": "Append /app/end.txt to /app/sorted.txt.",
        "steps/join/workdir/end.txt": "omega\n",
        "steps/join/solution/solve.sh": "cat end.txt >> sorted.txt\n",
        "steps/join/tests/test.sh": '[ "$(tail -n 1 /app/sorted.txt)" = omega ] && r=1 || r=0\n'
        "echo $r > /logs/verifier/reward.txt\n",
    },
    "own-image": {
        "task.toml": 'schema_version = "1.4"\nartifacts = ["/app/words.txt", "/app/first.txt"]\n'
        '[environment]\ndocker_image = "headrace.example/app:1"\nworkdir = "/app"\n[verifier.environment]\n',
        "instruction.md": "Write the first word of /app/words.txt to /app/first.txt.",
        "solution/solve.sh": "echo left > scratch\nhead -n 1 words.txt > first.txt\n",
        "tests/Dockerfile": "FROM headrace.example/base:1\nWORKDIR /judge\nCOPY . /tests/\n",
        "tests/test.sh": '[ "$(head -n 1 /app/words.txt)" = "$(cat /app/first.txt)" ] && [ ! -e /app/scratch ] '
        "&& r=1 || r=0\necho $r > /logs/verifier/reward.txt\n",
    },
}  # fmt: skip


def make(folder: Path) -> None:
    """``rows.jsonl``, the folder ``harbor`` of eight tasks, ``base`` with the Dockerfile of their base, ``layout`` with
    all images, and their ``tags``."""
    folder.mkdir(parents=True)
    maker = Maker(folder)
    maker.base_layers()
    rows = [maker.row(fault) for fault in FAULTS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, files in HARBOR.items():
        for path, text in files.items():
            place = folder / "harbor" / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    app = maker.work / "app"
    app.mkdir()
    (app / "words.txt").write_text("beta\nalpha\ngamma\ndelta\n")
    maker.image("headrace.example/app:1", app, "app")
    maker.images.append((BASE, maker.base, "/testbed"))
    maker.write_images()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
