"""The house keeps its shape: who imports whom, how long a file gets, the links at the root, a slim command line."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOUSE = ROOT / "headrace"

# Room -> rooms it may import. `policy.renderer`, `engines.base` and `vmhost.guest` are single doors into a room.
MAY: dict[str, set[str]] = {
    "messages": set(),
    "config": set(),
    "kernels": set(),
    "policy": {"kernels", "messages", "config"},
    "algorithms": {"kernels", "messages"},
    "weights": {"kernels", "messages"},
    "tasks": {"messages", "policy.renderer", "policy.tokenizer", "harness", "vmhost.guest"},
    "vmhost": {"messages", "config"},
    "bus": {"messages", "config"},
    "engines": {"policy", "kernels", "weights", "messages", "config"},
    "training": {"policy", "algorithms", "kernels", "weights", "messages", "tasks", "config"},
    "harness": {"messages", "policy.renderer", "policy.tokenizer", "engines.base"},
    "replay": {"bus", "training", "policy", "messages", "algorithms", "weights", "config"},
    "dashboard": {"bus", "messages", "config"},
    "actors": {
        "bus",
        "messages",
        "config",
        "policy",
        "algorithms",
        "weights",
        "tasks",
        "vmhost",
        "engines",
        "training",
        "harness",
        "replay",
        "kernels",
    },
}
MAY["launch"] = MAY["actors"] | {"actors", "launch", "dashboard", "cli"}
# Outside libraries that one room alone may touch.
ONLY = {"nats": "bus", "opentelemetry": "bus", "qemu": "vmhost", "triton": "kernels", "lz4": "messages weights"}
ONLY["prometheus_client"] = "engines"


def modules() -> list[Path]:
    return sorted(path for path in HOUSE.rglob("*.py"))


def imports(path: Path) -> list[str]:
    """Every module a file imports, inside functions too, with `from a import b` as both `a` and `a.b`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                # The guest agent lives under another name inside the guest, so its parts know each other by place.
                assert node.level == 1 and path.parent.name == "guest", f"{path}: imports are absolute in this house"
                continue
            found += [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def room_of(path: Path) -> str:
    parts = path.relative_to(HOUSE).parts
    return parts[0] if len(parts) > 1 else ""


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(HOUSE)))
def test_imports_keep_to_the_rooms(path: Path) -> None:
    room = room_of(path)
    for name in imports(path):
        top = name.split(".")[0]
        if top in ONLY and room:
            assert room in ONLY[top].split(), f"{path.name}: {top} belongs to {ONLY[top]}"
        if top != "headrace" or not room or name.count(".") == 0:
            continue
        target = name.split(".")[1]
        if room == "actors" and target == "actors":
            if name == "headrace.actors":
                continue
            helper = name.split(".")[2]
            assert helper in SHARED_BY_ACTORS or path.stem.startswith(f"{helper}_") or helper.startswith(path.stem), (
                f"{path.name}: actors meet in messages, not in {name}"
            )
            continue
        if target in {room, "__version__"}:
            continue
        allowed = MAY[room]
        door = ".".join(name.split(".")[1:3])
        doors = {entry for entry in allowed if entry.startswith(f"{target}.")}
        if doors:
            assert door in doors or name == f"headrace.{target}", (
                f"{path.name}: {room} may enter {target} by {doors} only"
            )
        else:
            assert target in allowed, f"{path.name}: {room} may not import {target}"


# Pieces of the actors' room that are no actors: the client side of the sandbox calls.
SHARED_BY_ACTORS = {"sandbox_client"}


def test_messages_stand_on_msgspec_and_lz4_alone() -> None:
    outside = {
        name.split(".")[0]
        for path in modules()
        if room_of(path) == "messages"
        for name in imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("headrace")
    }
    assert outside == {"msgspec", "lz4"}


def test_the_guest_agent_is_standard_library_alone() -> None:
    guests = [path for path in modules() if room_of(path) == "vmhost" and "guest" in path.relative_to(HOUSE).as_posix()]
    assert guests, "the guest agent is gone"
    for path in guests:
        for name in imports(path):
            # pytest is the guest's own, for suites of real packages.
            assert name.split(".")[0] in {*sys.stdlib_module_names, "pytest", "_pytest"}, f"{path}: {name}"


@pytest.mark.parametrize(
    "path",
    [*modules(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_file_has_one_idea(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 400, f"{lines} lines: two ideas in one file"
    assert path.name not in {"utils.py", "common.py", "helpers.py", "misc.py"}, "name the idea"


@pytest.mark.parametrize("name", ["actors", "messages", "kernels", "vmhost"])
def test_the_root_shows_the_four_rooms(name: str) -> None:
    assert (ROOT / name).is_symlink()
    assert (ROOT / name).resolve() == HOUSE / name


def test_kernels_is_no_regular_package() -> None:
    # A distribution of that name exists: with an __init__.py a checkout as working directory would shadow it.
    assert not (HOUSE / "kernels" / "__init__.py").exists()


def test_the_command_line_is_slim() -> None:
    code = (
        "import sys; from headrace import cli; "
        "heavy = {'torch', 'numpy', 'nats', 'opentelemetry', 'qemu', 'aiohttp'} & set(sys.modules); "
        "assert not heavy, heavy; cli.main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "headrace up" in done.stdout or "up" in done.stdout
