"""The layout of the repository: who imports whom, no cycles, sizes of files and folders, a slim command line."""

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "headrace"

# Folder -> folders that it may import, itself aside. Lower folders come first; an arrow never points upward.
MAY: dict[str, set[str]] = {
    "archives": set(),
    "messages": set(),
    "config": set(),
    "kernels": set(),
    "metrics": set(),
    "algorithms": {"kernels", "messages"},
    "policy": {"archives", "kernels", "messages", "config"},
    "weights": {"kernels", "messages"},
    "bus": {"messages", "config", "metrics"},
    "harnesses": {"archives", "messages", "config"},
    "vmhost": {"archives", "messages", "config", "harnesses"},
    "rendering": {"messages", "policy"},
    "search": {"messages", "config", "bus", "vmhost"},
    "engines": {"policy", "kernels", "weights", "messages", "config"},
    "tasks": {"archives", "messages", "config", "vmhost"},
    "sandboxes": {"messages", "bus"},
    "training": {"policy", "rendering", "algorithms", "kernels", "weights", "messages", "config"},
    "harness": {"messages", "rendering", "engines", "search", "vmhost"},
    "judging": {"messages", "config", "tasks", "vmhost", "algorithms", "sandboxes"},
    "ledger": {"messages", "config", "algorithms", "bus", "harnesses"},
    "bench": {"messages", "algorithms", "bus", "ledger"},
    "replay": {"bus", "training", "policy", "messages", "algorithms", "weights", "config", "ledger"},
    "gateway": {"archives", "messages", "config", "bus", "judging"},
    "editor": {"archives", "gateway"},
}
MAY["recipes"] = {"config", "policy", "rendering", "tasks", "training"}
_LIBRARIES = set(MAY)
MAY["actors"] = _LIBRARIES
MAY["dashboard"] = {"bench", "bus", "messages", "config", "ledger", "metrics", "replay", "vmhost", "weights"}
MAY["launch"] = {
    "gateway",
    "bench",
    "actors",
    "dashboard",
    "ledger",
    "bus",
    "metrics",
    "messages",
    "config",
    "tasks",
    "vmhost",
    "replay",
    "policy",
    "rendering",
    "engines",
    "search",
    "training",
    "weights",
}
MAY["chaos"] = {"launch", "dashboard", "bus", "messages", "metrics", "config", "replay"}
MAY["trial"] = _LIBRARIES | {"actors"}
MAY["cli"] = _LIBRARIES | {"actors", "dashboard", "launch", "chaos", "trial"}

# Modules below all folders: they import the standard library and one another.
FOUNDATION = {
    "backoff",
    "errors",
    "garbage",
    "inner_paths",
    "syntax_trees",
    "machine_memory",
    "nkeys",
    "parent_death",
    "process_stat",
    "python_modules",
    "request_names",
    "secret_files",
    "terminal_text",
    "timed_commands",
}
# headrace/registry.py stands above these folders and below all others.
REGISTRY_IMPORTS = {"errors", "messages"}

# Where only some parts of a folder may be imported.
PARTS: dict[tuple[str, str], set[str]] = {
    ("launch", "engines"): {"registry", "server"},
    ("launch", "policy"): {"config", "layout"},  # the shape of a checkpoint
    ("recipes", "policy"): {"config", "layout", "adapters"},
    ("recipes", "training"): {"memory_plan"},
    ("launch", "training"): {"memory_plan"},  # whether the trainer fits
    ("launch", "weights"): {"full"},  # whether the location of full snapshots can be opened
    ("harness", "engines"): {"base"},
    ("harness", "search"): {"keywords"},  # how words of identifiers are ranked
    ("harness", "vmhost"): {"guest"},  # what a line and a path are
    ("search", "vmhost"): {"guest"},
    ("dashboard", "vmhost"): {"guest"},
    ("dashboard", "weights"): {"receiving"},
    ("judging", "vmhost"): {"guest", "images"},
    ("judging", "sandboxes"): {"calls"},
    ("gateway", "judging"): {"rubrics"},  # the client of the judge model
    ("tasks", "vmhost"): {"guest", "agent_files", "images", "errors"},
}
# Outside libraries that belong to some folders alone.
ONLY = {
    "nats": {"bus"},
    "opentelemetry": {"bus"},
    "qemu": {"vmhost"},
    "triton": {"kernels"},
    "gguf": {"policy"},
    "lz4": {"messages"},
    "prometheus_client": {"dashboard", "engines", "metrics"},
    "transformers": {"policy"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """The dotted name of a module without its leading ``headrace.``; a package's is its folder's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path): path for path in modules()}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements. An expression has none inside, and most nodes of a tree are expressions."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Absolute names of all imported modules, inside functions too; `from a import b` is `a.b` if that is a module."""
    package = path.relative_to(ROOT).parent.parts
    names: set[str] = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                # Inside the guest the agent is a package of another name, so its parts import each other relatively.
                assert "guest" in package, f"{path}: imports are absolute outside vmhost/guest"
                base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                names.add(full if full.removeprefix("headrace.") in NAMES else base)
    return frozenset(names)


def graph() -> dict[str, set[str]]:
    """Which of the package's modules imports which."""
    edges: dict[str, set[str]] = {}
    for name, path in NAMES.items():
        targets = {target.removeprefix("headrace.") for target in imports(path) if target.startswith("headrace.")}
        edges[name] = {target for target in targets if target in NAMES} - {name}
    return edges


def cycles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected components with more than one node (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: set[frozenset[str]] = set()

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                components.add(frozenset(component))

    for node in edges:
        if node not in index:
            visit(node)
    return components


def test_the_search_for_cycles_finds_one() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {frozenset({"b", "c"})}
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


def test_no_module_imports_itself_by_a_detour() -> None:
    assert cycles(graph()) == set()


def test_no_folder_imports_itself_by_a_detour() -> None:
    edges: dict[str, set[str]] = defaultdict(set)
    for source, targets in graph().items():
        edges[source.partition(".")[0]] |= {target.partition(".")[0] for target in targets}
    assert cycles({folder: targets - {folder} for folder, targets in edges.items()}) == set()


def forbidden_imports(path: Path) -> list[str]:
    """One sentence for each import of a module that the tables above forbid."""
    parts = path.relative_to(PACKAGE).parts
    folder = parts[0] if len(parts) > 1 else ""
    where = path.relative_to(PACKAGE)
    offences: list[str] = []
    for name in sorted(imports(path)):
        top, _, rest = name.partition(".")
        if top in ONLY and folder and folder not in ONLY[top]:
            offences.append(f"{where}: {top} belongs to {sorted(ONLY[top])}")
        if top != "headrace" or not folder or not rest:
            continue
        target, _, part = rest.partition(".")
        if target in {folder, "__version__"} or target in FOUNDATION:
            continue
        if target == "registry":
            if folder in REGISTRY_IMPORTS:
                offences.append(f"{where}: {folder} lies below the registry")
        elif target not in MAY[folder]:
            offences.append(f"{where}: {folder} may not import {target}")
        elif (allowed := PARTS.get((folder, target))) and part.partition(".")[0] not in allowed:
            offences.append(f"{where}: of {target}, {folder} may import {sorted(allowed)}")
    return offences


def test_imports_follow_the_table() -> None:
    assert [offence for path in modules() for offence in forbidden_imports(path)] == []


def test_the_foundation_imports_the_standard_library_and_itself_alone() -> None:
    itself = {f"headrace.{name}" for name in FOUNDATION}
    for name in FOUNDATION:
        outside = {module for module in imports(NAMES[name]) if module not in itself}
        assert {module.partition(".")[0] for module in outside} <= set(sys.stdlib_module_names)


def test_the_registry_imports_messages_alone() -> None:
    assert {target.partition(".")[0] for target in graph()["registry"]} == REGISTRY_IMPORTS


def test_actors_never_import_actors() -> None:
    for source, targets in graph().items():
        source_parts = source.split(".")[:2]
        for target in targets:
            if source_parts[0] == "actors" and target.startswith("actors.") and source != "actors.registry":
                assert target.split(".")[:2] == source_parts and len(source.split(".")) > 2, (
                    f"{source} imports {target}"
                )


def test_messages_use_msgspec_and_lz4_alone() -> None:
    outside = {
        name.split(".")[0]
        for path in modules()
        if path.relative_to(PACKAGE).parts[0] == "messages"
        for name in imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("headrace")
    }
    assert outside == {"msgspec", "lz4"}


def test_the_slot_agent_is_standard_library_alone() -> None:
    agent = sorted((PACKAGE / "vmhost" / "guest").rglob("*.py"))
    assert agent, "the slot agent is gone"
    for path in agent:
        for name in imports(path):
            # pytest is the guest's own, for suites of real packages.
            assert name.startswith("headrace.vmhost.guest") or name.split(".")[0] in {
                *sys.stdlib_module_names,
                "pytest",
                "_pytest",
            }, f"{path}: {name}"


def test_a_file_says_its_idea_in_its_name() -> None:
    paths = [*modules(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]
    nameless = {"utils.py", "common.py", "helpers.py", "misc.py"}
    assert [str(path) for path in paths if path.name in nameless] == [], "name the idea"


@pytest.mark.parametrize("name", ["actors", "messages", "kernels", "vmhost"])
def test_the_root_shows_four_folders(name: str) -> None:
    assert (ROOT / name).is_symlink()
    assert (ROOT / name).resolve() == PACKAGE / name


def test_kernels_is_no_regular_package() -> None:
    # A distribution of that name exists: with an __init__.py a checkout as working directory would shadow it.
    assert not (PACKAGE / "kernels" / "__init__.py").exists()


def test_the_command_line_is_slim() -> None:
    code = (
        "import sys; from headrace.cli import main; "
        "heavy = {'torch', 'numpy', 'nats', 'opentelemetry', 'qemu', 'aiohttp'} & set(sys.modules); "
        "assert not heavy, heavy; main.main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "up" in done.stdout


def test_actors_without_weights_do_not_load_torch() -> None:
    """torch takes 2 s of processor time and 190 MB in each process that imports it."""
    code = (
        "import sys; from headrace.actors.registry import ACTORS, load_class; "
        "light = set(ACTORS) - {'trainer', 'weight_sender', 'weight_receiver'}; "
        "loaded = [load_class(name) for name in sorted(light)]; "
        "assert 'torch' not in sys.modules and len(loaded) > 8"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
