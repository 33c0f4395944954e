"""Parts of a seam by name: built-ins, entry points of an installed distribution, module:attribute, and their hashes."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import registry
from headrace.registry import SEAMS, PluginError, Registry, admit, admitted, differing, plugins, source_hash


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with a distribution that has entry points, as pip would have installed it."""
    (tmp_path / "outside_reward.py").write_text("__version__ = '7'\n\ndef reward():\n    return 0.5\n")
    package = tmp_path / "outside_tools"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "counting.py").write_text("from outside_tools import helper\n\nclass Count:\n    run = helper.run\n")
    (package / "helper.py").write_text("def run():\n    return 1\n")
    dist = tmp_path / "outside_tools-2.5.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-tools\nVersion: 2.5\n")
    (dist / "entry_points.txt").write_text("[headrace.tools]\ncount = outside_tools.counting:Count\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._entry_points.cache_clear()
    source_hash.cache_clear()
    yield tmp_path
    registry._entry_points.cache_clear()
    source_hash.cache_clear()
    for name in [name for name in sys.modules if name.startswith("outside_")]:
        del sys.modules[name]


TOOLS: Registry[object] = Registry("tools", {"join": "os.path:join"}, needs=("__call__",))


def test_a_builtin_is_loaded_when_it_is_asked_for_and_is_no_plugin() -> None:
    import os.path

    assert TOOLS.get("join") is os.path.join
    assert TOOLS.plugin("join") is None and TOOLS.builtin("join")
    assert "join" in TOOLS.names()


def test_an_entry_point_has_the_version_of_its_distribution(outside: Path) -> None:
    tools: Registry[object] = Registry("tools", {"join": "os.path:join"}, needs=("run",))
    assert tools.names() == ("join", "count")
    part = tools.get("count")
    assert isinstance(part, type) and part.__name__ == "Count"
    plugin = tools.plugin("count")
    assert plugin is not None
    assert (plugin.seam, plugin.name, plugin.version, len(plugin.source)) == ("tools", "count", "2.5", 64)


def test_module_and_attribute_need_no_installation(outside: Path) -> None:
    rewards: Registry[object] = Registry("rewards", {})
    admit("rewards", ["outside_reward:reward"])
    part = rewards.get("outside_reward:reward")
    assert callable(part) and part() == 0.5
    plugin = rewards.plugin("outside_reward:reward")
    assert plugin is not None and plugin.version == "7"
    assert plugins((rewards, ["outside_reward:reward"]), (TOOLS, ["join"])) == (plugin,)


def test_the_hash_changes_with_a_helper_of_the_package(outside: Path) -> None:
    before = Registry[object]("tools", {}).plugin("count")
    (outside / "outside_tools" / "helper.py").write_text("def run():\n    return 2\n")
    source_hash.cache_clear()
    after = Registry[object]("tools", {}).plugin("count")
    assert before is not None and after is not None
    assert differing([before], [before]) == ""
    sentence = differing([before], [after])
    assert "headrace.tools: count has source hash" in sentence and before.source[:12] in sentence
    assert "is not configured here" in differing([before], [])


def test_a_folder_that_is_on_the_path_twice_counts_once(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that runs in the folder of a namespace package had another hash than the ranks that it started."""
    (outside / "outside_space").mkdir()
    (outside / "outside_space" / "part.py").write_text("value = 1\n")
    once = source_hash("outside_space.part")
    source_hash.cache_clear()
    del sys.modules["outside_space.part"], sys.modules["outside_space"]
    monkeypatch.chdir(outside)
    monkeypatch.syspath_prepend("")
    assert source_hash("outside_space.part") == once


def test_what_cannot_be_used_is_said_in_one_sentence(outside: Path) -> None:
    with pytest.raises(PluginError, match="expected one of join, count or module:attribute, got 'jion'"):
        TOOLS.get("jion")
    admit("tools", ["no_such_module:x", "outside_reward:nothing", "outside_broken:x"])
    with pytest.raises(PluginError, match=r"'no_such_module:x' cannot be loaded: ModuleNotFoundError.*PYTHONPATH"):
        TOOLS.get("no_such_module:x")
    with pytest.raises(PluginError, match=r"'outside_reward:nothing' cannot be loaded: AttributeError"):
        TOOLS.get("outside_reward:nothing")
    (outside / "outside_broken.py").write_text("1 / 0\n")
    importlib.invalidate_caches()
    with pytest.raises(PluginError, match="'outside_broken:x' cannot be loaded: ZeroDivisionError"):
        TOOLS.get("outside_broken:x")
    with pytest.raises(PluginError, match="'count' has no sing"):
        Registry[object]("tools", {}, needs=("run", "sing")).get("count")
    with pytest.raises(PluginError, match="has the name of a built-in, 'count'"):
        Registry[object]("tools", {"count": "os.path:join"}).get("count")
    with pytest.raises(PluginError, match="its Python source is not on this node"):
        source_hash("itertools")


UNKNOWN = (
    "outside_reward:reward",
    "outside_reward:reward.__globals__",
    "outside_tools.counting:Count",
    "cProfile:run",
    "os:system",
    "os.path:join",
    "headrace.registry:admit",
    "count:Count",
    " count",
    "COUNT",
    "\u0441ount",
    "count\0",
    "../count",
    "outside_reward:",
    ":reward",
    "",
    "\ud800:x",
)


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_nobody_admitted_imports_nothing(outside: Path, seam: str, name: str) -> None:
    registered: Registry[object] = Registry(seam, {"join": "os.path:join"})
    for other in SEAMS:
        if other != seam:
            admit(other, UNKNOWN)
    before = set(sys.modules)
    for resolve in (registered.get, registered.plugin):
        with pytest.raises(PluginError):
            resolve(name)
    assert set(sys.modules) - before == set()


def test_a_name_is_admitted_for_one_seam(outside: Path) -> None:
    admit("rewards", ["outside_reward:reward"])
    admit("rewards", ["outside_reward:other"])
    assert admitted() == {"rewards": ("outside_reward:other", "outside_reward:reward")}
    assert callable(Registry[object]("rewards", {}).get("outside_reward:reward"))
    with pytest.raises(ValueError, match="expected a seam"):
        admit("bus", ["outside_reward:reward"])
