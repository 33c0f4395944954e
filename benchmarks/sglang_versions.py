"""Reads the source of SGLang releases and writes which of them have the interface that headrace's client uses.

    pip download --no-deps --only-binary :all: -d WHEELS sglang==0.5.23   # and other releases
    python -m benchmarks.sglang_versions WHEELS

The list of needs is the one that the client compares with a server's own description (`probes.capabilities`). The
source also shows what a description does not contain: the version spans of a reply, the pause in place, and the
checksums. Nothing of SGLang is imported or run.
"""

import argparse
import ast
import datetime
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.engines.sglang.probes import capabilities
from headrace.engines.sglang.probes.capabilities import Fields, Need

RESULT = Path(__file__).parents[1] / "deploy" / "sglang" / "versions.json"
SERVER = "sglang/srt/entrypoints/"
WORDS = {
    "weight_versions in a reply": ("sglang/srt/managers/", '"weight_versions"'),
    "pause mode in_place": ("sglang/srt/managers/io_struct.py", '"in_place"'),
    "checksums of /weights_checker": ("sglang/srt/", '"checksum"'),
    "num_retractions in a reply": ("sglang/srt/", '"num_retractions"'),
    "the argument --retraction-policy": ("sglang/srt/", "retraction_policy"),
}
"""Capabilities that a description does not contain: the folder, and the literal in the source."""


def texts(wheel: Path) -> dict[str, str]:
    """The Python files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py") and name.startswith("sglang/srt/")]
        return {name: archive.read(name).decode("utf-8", "replace") for name in names}


def described(files: Mapping[str, str]) -> Fields:
    """The fields by path in the source of a server."""
    routes: dict[str, str] = {}
    for name, text in files.items():
        if name.startswith(SERVER):
            routes.update(_routes(ast.parse(text)))
    classes = {
        node.name: node
        for name in files
        if name.endswith("managers/io_struct.py") or name.startswith("sglang/srt/managers/io_struct/")
        for node in ast.walk(ast.parse(files[name]))
        if isinstance(node, ast.ClassDef)
    }

    def members(name: str) -> frozenset[str]:
        node = classes.get(name)
        if node is None:
            return frozenset()
        targets = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        return frozenset(names).union(*(members(base.id) for base in node.bases if isinstance(base, ast.Name)))

    return lambda path: members(routes[path]) if path in routes else None


def _routes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Path, and the class of the request's body (empty without one)."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and decorator.args and isinstance(decorator.args[0], ast.Constant):
                path = decorator.args[0].value
                if isinstance(path, str) and path.startswith("/"):
                    kinds = [ast.unparse(argument.annotation) for argument in node.args.args if argument.annotation]
                    bodies = re.findall(r"\b(\w+Req\w*)\b", " ".join(kinds))
                    yield path, bodies[0] if bodies else ""


def order(wheel: Path) -> list[int]:
    """Sort key of a wheel: the numbers in its release."""
    return [int(number) for number in re.findall(r"\d+", wheel.name.split("-")[1])]


def row(files: Mapping[str, str]) -> dict[str, Any]:
    """The capabilities of one release, and the needs that it does not meet."""
    fields = described(files)
    decided, lost = capabilities.decide(fields, mixture=True)
    lost += [
        what
        for what, (folder, word) in WORDS.items()
        if not any(word in text for name, text in files.items() if name.startswith(folder))
    ]
    everything: tuple[Need, ...] = capabilities.TENSORS
    return {
        "usable": not lost,
        "lacks": lost,
        "weights_as_tensors": not capabilities.missing(everything, fields),
        "update_sessions": decided.session,
        "priorities": decided.priorities,
    }


def main() -> None:
    """Read the wheels and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang_versions")
    parser.add_argument("wheels", type=Path, help="folder with wheels of SGLang")
    wheels = sorted(parser.parse_args().wheels.glob("sglang-*.whl"), key=order)
    table = {wheel.name.split("-")[1]: row(texts(wheel)) for wheel in wheels}
    for release, said in table.items():
        print(release, json.dumps(said))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    RESULT.write_text(json.dumps({"date": today, "releases": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
