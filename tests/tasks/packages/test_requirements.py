"""Requirements are read from where packages name them, and their absence from error messages."""

from pathlib import Path

import pytest

from headrace.config import Environment
from headrace.tasks.packages import requirements, sdist
from headrace.tasks.packages.fetch import read
from headrace.tasks.packages.lab import Lab
from headrace.vmhost.node.host import Host

METADATA = """Metadata-Version: 2.4
Name: Thing
Version: 1.0
Requires-Dist: idna<4,>=2.5
Requires-Dist: tomli; python_version < "3.11"
Requires-Dist: hypothesis; extra == "tests"
Requires-Dist: mypy>=1.11; extra == "tests"
Requires-Dist: furo; extra == "docs"
Provides-Extra: tests

A description: with a colon.
"""
PROJECT = """[project]
name = "thing"
dependencies = ["idna"]
[project.optional-dependencies]
test = ["thing[extra]", "trustme"]
[dependency-groups]
dev = ["ruff", "pympler", {include-group = "docs"}]
"""
FILE = "-e .[socks]\n# tools\npytest>=2.8.0,<9\npytest-cov\npytest-httpbin==2.0.0\nhttpbin~=0.10.0  # a server\n"


def test_the_requirements_of_a_tree(tmp_path: Path) -> None:
    assert requirements.named(tmp_path) == ()
    (tmp_path / "PKG-INFO").write_text(METADATA)
    assert requirements.named(tmp_path) == ("hypothesis", "idna<4,>=2.5")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    assert requirements.named(tmp_path) == ("hypothesis", "idna<4,>=2.5", "pympler", "trustme")
    (tmp_path / "requirements-dev.txt").write_text(FILE)
    (tmp_path / "requirements-docs.txt").write_text("sphinx-copybutton\n")
    assert "httpbin~=0.10.0" in requirements.named(tmp_path) and "pytest-httpbin==2.0.0" in requirements.named(tmp_path)
    assert not {"sphinx-copybutton", "pytest-cov"} & set(requirements.named(tmp_path))


def test_missing_modules_are_read_from_messages() -> None:
    said = ["ModuleNotFoundError: No module named 'b.c'", "x", "E  No module named 'a'", "No module named 'a'"]
    assert requirements.missing(said) == ("a", "b.c")


def test_what_pip_cannot_install_is_one_sentence() -> None:
    files, error = requirements.install(["no-such-distribution-of-anybody==99"])
    assert files == {} and error.startswith("pip cannot install no-such-distribution-of-anybody==99: ")


def test_an_installation_that_takes_too_long_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "PIP_S", 0.01)
    assert requirements.install(["no-such==1"]) == ({}, "pip did not install no-such==1 within 0.01 s")


@pytest.mark.anyio
async def test_a_missing_module_comes_in_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a requirement lie where the sandbox's Python finds them; pip itself is stood in for by a folder."""
    (tmp_path / "thing.py").write_text("def f():\n    return 1\n")
    test = "import helper_of_tests\nfrom thing import f\n\n\ndef test_f():\n    assert f() == helper_of_tests.ONE\n"
    (tmp_path / "test_thing.py").write_text(test)
    (tmp_path / "PKG-INFO").write_text("Name: thing\nRequires-Dist: helper-of-tests\n")
    package = read(tmp_path, "thing")
    assert package.requires == ("helper-of-tests",)
    asked: list[tuple[str, ...]] = []

    def install(wanted: tuple[str, ...]) -> tuple[dict[str, bytes], str]:
        asked.append(wanted)
        return {f"{requirements.FOLDER}/helper_of_tests.py": b"ONE = 1\n"}, ""

    monkeypatch.setattr(sdist, "install", install)
    host = await Host.open(Environment(backend="process", max_vms=8))
    said: list[str] = []
    try:
        lab = Lab(host, "requirements", "light")
        complete = await sdist.with_requirements(lab, package, said.append)
        _, names, _ = await sdist.baseline(lab, complete, said.append)
    finally:
        await host.close()
    assert asked == [("helper-of-tests",)] and names == ("test_thing.py::test_f",)
    assert said == ["tests of thing miss helper_of_tests; installing helper-of-tests"]
    assert complete.sources == ("thing.py",), "no bug is put into a dependency"
