"""Every package that a release, the image or the tests install is pinned: equal commits give equal bits."""

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT


def pins() -> dict[str, str]:
    """Package to version, as constraints.txt has them."""
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def closure(extras: frozenset[str]) -> dict[str, str]:
    """All that headrace needs with these extras, by the metadata of what is installed: package to version."""
    versions: dict[str, str] = {}
    waiting, seen = [("headrace", extras)], set()
    while waiting:
        entry = name, asked = waiting.pop()
        if entry in seen:
            continue
        seen.add(entry)
        installed = distribution(name)
        versions[name] = installed.version.partition("+")[0]
        for need in map(Requirement, installed.requires or ()):
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in (asked or {""})):
                waiting.append((canonicalize_name(need.name), frozenset(need.extras)))
    del versions["headrace"]
    return versions


def release_script(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """A module of deploy/release, which is no package."""
    monkeypatch.syspath_prepend(str(ROOT / "deploy" / "release"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "deploy" / "release" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpinned(extras: frozenset[str]) -> dict[str, str]:
    pinned = pins()
    return {name: version for name, version in closure(extras).items() if pinned.get(name) != version}


def test_every_package_of_the_image_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = frozenset(release_script(monkeypatch, "image").EXTRAS.split(","))
    assert len(closure(extras)) > 70
    assert unpinned(extras) == {}


def test_every_package_of_the_tests_and_of_the_bill_of_materials_is_pinned() -> None:
    assert unpinned(frozenset({"dev"})) == {}
    try:
        closure(frozenset({"release"}))
    except PackageNotFoundError:
        pytest.skip("needs pip install 'headrace[release]'")
    assert unpinned(frozenset({"release"})) == {}


def test_a_package_without_a_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = pins()
    del pinned["pydantic-core"]
    monkeypatch.setattr(f"{__name__}.pins", lambda: pinned)
    assert set(unpinned(frozenset({"mcp"}))) == {"pydantic-core"}
