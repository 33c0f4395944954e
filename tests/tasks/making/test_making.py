"""Tasks from a tiny package and from a tiny repository, made and certified in real sandboxes."""

import io
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config import Environment
from headrace.messages.tasks import TestPlan
from headrace.tasks import certificates, open_suite
from headrace.tasks.leaks import remains
from headrace.tasks.making import commits, features, removal
from headrace.tasks.packages.fetch import read
from headrace.tasks.packages.lab import Exam, Lab
from headrace.vmhost.node.host import Host
from tests.support import forged

pytestmark = pytest.mark.anyio

WORDS = '''"""Words."""

__all__ = ["longest", "initials"]


def longest(text):
    """The longest word of a text, the first of several; an empty text has none."""
    best = ""
    for word in text.split():
        if len(word) > len(best):
            best = word
    return best


# The letters, as in an abbreviation.
def initials(text):
    """The first letters of the words of a text, in upper case, without spaces."""
    letters = [word[0] for word in text.split()]
    joined = "".join(letters)
    return joined.upper()
'''
TESTS = """from words import initials, longest


def test_longest():
    assert longest("a bcd ef") == "bcd"


def test_longest_of_several():
    assert longest("ab cd") == "ab" and longest("") == ""


def test_initials():
    assert initials("ab cd") == "AC"


def test_initials_of_nothing():
    assert initials("") == ""
"""
NAMES = tuple(
    f"tests/test_words.py::test_{name}" for name in ("initials", "initials_of_nothing", "longest", "longest_of_several")
)
FILES = {
    "words/__init__.py": "from words.text import initials, longest\n",
    "words/text.py": WORDS,
    "tests/test_words.py": TESTS,
}

USED = "\nfrom words import text\n\nOLD_NAMES = {'widest': text.longest}\n"


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="process", max_vms=8))
    yield opened
    await opened.close()


def write(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def make(kind: str, source: Path, suites: Path, *more: str) -> int:
    backend = ("--set", 'environment.backend="process"', "--set", f"tasks.dir={suites}")
    return main(["tasks", "make", kind, str(source), "--name", "made", *more, *backend])


async def test_a_deleted_feature_is_a_task(tmp_path: Path, host: Host) -> None:
    package = read(write(tmp_path, FILES), "words-1.0")
    exam = Exam(plan=TestPlan(kind="pytest", paths=package.tests), expected=NAMES)
    (feature,) = [each for each in removal.features(package) if each.name == "longest"]
    task, oracle = await features.attempt(Lab(host, "making", "debian"), package, feature, exam, "made")
    assert "def longest(text)" in task.prompt and task.family == "feature:words"
    assert task.files["words/__init__.py"].decode() == "from words.text import initials\n"
    assert not any(b"longest" in content for content in task.files.values())
    assert set(oracle.expected) == {name for name in NAMES if "longest" in name}
    assert {*oracle.expected, *oracle.grading.pass_to_pass} == set(NAMES)
    assert {path: content.decode() for path, content in oracle.solution.items()} == {
        path: FILES[path] for path in ("words/__init__.py", "words/text.py")
    }


async def test_a_feature_that_the_import_needs_keeps_its_signature(tmp_path: Path, host: Host) -> None:
    package = read(write(tmp_path, FILES | {"words/__init__.py": FILES["words/__init__.py"] + USED}), "words-1.0")
    exam = Exam(plan=TestPlan(kind="pytest", paths=package.tests), expected=NAMES)
    (feature,) = [each for each in removal.features(package) if each.name == "longest"]
    task, oracle = await features.attempt(Lab(host, "making", "debian"), package, feature, exam, "made")
    left = task.files["words/text.py"].decode()
    assert "has lost the body of `longest`" in task.prompt and "for word in text.split():" not in left
    assert left.partition("an empty text has none.")[2].startswith(
        '"""\n    raise NotImplementedError\n\n\n# The letters'
    )
    assert set(oracle.expected) == {name for name in NAMES if "longest" in name}
    assert set(oracle.grading.pass_to_pass) == {name for name in NAMES if "initials" in name}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["features", "mutations"])
def test_the_command_makes_certified_tasks_and_goes_on(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = write(tmp_path / "words", FILES)
    assert make(kind, tree, tmp_path / "suites", "--count", "1") == 0
    suite = open_suite("made", tmp_path / "suites")
    assert len(suite.ids()) == 1 and suite.oracle(suite.ids()[0]).sealed
    assert certificates.refusal(suite, tmp_path / "suites", False) == ""
    capsys.readouterr()
    assert make(kind, tree, tmp_path / "suites", "--count", "1") == 0  # there is nothing left to make
    assert "must pass" not in capsys.readouterr().out


def commit(tree: Path, message: str) -> str:
    """Commit all files of a tree, which becomes a repository, and return the id."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", "init", "-q"], cwd=tree, check=True, capture_output=True, text=True)
    for arguments in (["add", "."], [*who, "commit", "-q", "-m", message], ["rev-parse", "HEAD"]):
        done = subprocess.run(["git", *arguments], cwd=tree, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--changed-tests",)], ids=["all", "changed"])
def test_a_commit_is_a_certified_task(tmp_path: Path, options: tuple[str, ...]) -> None:
    more = {"words/old.py": "x = 1\n", "tests/test_more.py": "def test_more():\n    assert True\n"}
    tree = write(tmp_path / "words", FILES | more)
    commit(tree, "Words")
    right = WORDS.replace('text.split()]\n    joined = "".join', 'text.split("-")]\n    joined = ".".join')
    new = TESTS.replace('initials("ab cd") == "AC"', 'initials("ab-cd") == "A.C"').replace(
        'initials("")', 'initials("a")'
    )
    new = new.replace('initials("a") == ""', 'initials("a") == "A"')
    write(tree, {"words/text.py": right, "tests/test_words.py": new})
    (tree / "words/old.py").unlink()
    wanted = commit(tree, "Initials have points\n\nSigned-off-by: a <a@b.c>")
    write(tree, {"words/text.py": right + "\n\nx = 1\n"})
    commit(tree, "Without tests")
    assert make("commits", tree, tmp_path / "suites", *options) == 0
    suite = open_suite("made", tmp_path / "suites")
    assert list(suite.ids()) == [f"words--{wanted[:12]}"]
    task, oracle = suite.task(suite.ids()[0]), suite.oracle(suite.ids()[0])
    assert task.prompt == "Make this change:\n\nInitials have points\n"
    assert task.tests.paths == ("tests/test_words.py",) if options else ("tests/test_more.py", "tests/test_words.py")
    assert task.files["words/text.py"].decode() == WORDS and task.files["tests/test_words.py"].decode() == TESTS
    pass_to_pass = oracle.grading.pass_to_pass
    assert oracle.expected == ("tests/test_words.py::test_initials",) and len(pass_to_pass) == 3 + (not options)
    assert ("tests/test_more.py::test_more" in pass_to_pass) == (not options)
    assert oracle.solution == {"words/text.py": right.encode()} and oracle.removed == ("words/old.py",)
    assert certificates.refusal(suite, tmp_path / "suites", False) == ""


def test_globs_choose_the_tests_that_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = write(tmp_path / "words", FILES)
    commit(tree, "Words")
    write(tree, {"words/text.py": WORDS + "x = 1\n", "tests/fast/test_x.py": "", "tests/slow/test_y.py": ""})
    both = commit(tree, "More")
    assert [(one.id, one.tests) for one in commits.commits(tree)] == [
        (both, ("tests/fast/test_x.py", "tests/slow/test_y.py"))
    ]
    assert [one.tests for one in commits.commits(tree, ["tests/fast/*", "*/test_z.py"])] == [("tests/fast/test_x.py",)]
    assert list(commits.commits(tree, ["*/test_z.py"])) == []
    assert make("commits", tree, tmp_path / "suites", "--only-tests", "tests/fast/*") == 2
    assert make("features", tree, tmp_path / "suites", "--changed-tests", "--only-tests", "tests/fast/*") == 2
    assert capsys.readouterr().err.count("--only-tests needs `make commits` with --changed-tests") == 2


def test_the_agent_runs_the_changed_tests_or_the_nearest_ones() -> None:
    tests = ("tests/a/test_one.py", "tests/a/test_two.py", "tests/test_top.py")
    assert commits.visible(tests, ("tests/a/test_two.py", "tests/b/test_new.py")) == ("tests/a/test_two.py",)
    assert commits.visible(tests, ("tests/a/deep/test_new.py",)) == ("tests/a/test_one.py", "tests/a/test_two.py")
    assert commits.visible(tests, ("tests/b/test_new.py",)) == ("tests/test_top.py",)
    assert commits.visible(tests, ("more/test_new.py",)) == tests


def test_no_feature_and_no_commit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = write(tmp_path / "words", {"words.py": "x = 1\n"})
    assert make("commits", tree, tmp_path / "suites") == 1
    assert "git cannot read" in capsys.readouterr().err
    assert make("features", tree, tmp_path / "suites") == 1
    assert "has no test files" in capsys.readouterr().err


def test_a_repository_that_git_does_not_read_in_time_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(commits, "GIT_S", 1e-6)
    assert make("commits", tmp_path, tmp_path / "suites") == 1
    assert f"git did not read {tmp_path} within 1e-06 s" in capsys.readouterr().err


def test_a_test_names_a_feature_in_its_function_or_its_class(tmp_path: Path) -> None:
    methods = "    def test_it(self):\n        initials\n\n    def test_b(self): ...\n"
    text = f"class TestText:\n    call = words.longest\n\n{methods}"
    package = read(write(tmp_path, FILES | {"tests/test_words.py": text}), "words-1.0")
    named = {
        word: removal.mentions(package, {"tests/test_words.py::TestText::test_b[1]": None}, word)
        for word in ("longest", "initials")
    }
    assert named == {"longest": True, "initials": False}
    assert removal.mentions(package, {"tests/test_words.py::TestText::test_it": None}, "initials")


def test_imports_lose_the_name_alone(tmp_path: Path) -> None:
    many = "from words.text import (  # all\n    initials,\n    longest as long,\n)\nfrom words import longest\n"
    package = read(write(tmp_path, FILES | {"words/more.py": many}), "words")
    (feature,) = [each for each in removal.features(package) if each.name == "longest"]
    changed = removal.without(package, feature)
    assert changed is not None
    assert changed["words/more.py"] == b"from words.text import initials\npass\n"
    assert changed["words/text.py"].startswith(b'"""Words."""\n\n__all__ = ["initials"]\n\n\n# The letters')
    assert b"longest" not in changed["words/text.py"]


def test_deleted_text_is_found_wherever_it_is_left() -> None:
    text = WORDS[WORDS.index("def longest") : WORDS.index("# The letters")]
    packed, tar = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("copy.py", text)
    with tarfile.open(fileobj=tar, mode="w:gz") as archive:
        info = tarfile.TarInfo("copy.py")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text.encode()))
    left = {
        "docs/words.md": text.replace("    ", "  ").encode(),
        "old.whl": packed.getvalue(),
        "old.tar.gz": tar.getvalue(),
        ".git/objects/ab/cdef": zlib.compress(b"blob 5\0" + text.encode()),
        "words/__pycache__/text.cpython-311.pyc": compile(text, "text.py", "exec").co_names[0].encode(),
    }
    clean = {"words/text.py": WORDS.replace(text, "").encode(), ".git/HEAD": b"x", "broken.zip": b"PK\x03\x04"}
    leftovers = list(remains(left | clean, [text], ("longest",)))
    assert len(leftovers) == len(left) and not list(remains(clean, [text], ("longest",)))


def test_an_archive_that_is_too_large_to_search_is_named_instead_of_passed() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes((64 << 20) + 1))
    [sentence] = remains({"a.zip": stream.getvalue()}, [WORDS])
    assert sentence == "a.zip may hold the solution and is not searched: it unpacks to more than 64 MiB"


async def test_commits_are_listed_without_the_programs_that_their_repository_names(tmp_path: Path) -> None:
    repository = forged.repository_at(tmp_path / "r")
    ran = forged.armed(repository)
    assert [commit.message for commit in commits.commits(repository)] == ["signed"]
    assert not ran.exists(), ran.read_text()
