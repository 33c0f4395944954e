"""Nothing in the package unpickles: a pickle is code, and a program that reaches a socket or a file can send one."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PICKLES = {
    "pickle", "_pickle", "cPickle", "pickletools", "marshal", "shelve", "copyreg", "dill", "cloudpickle", "joblib",
    "jsonpickle", "multiprocessing", "torch.multiprocessing",
}  # fmt: skip
"""Modules that pickle, or whose queues, pipes and pools do."""
SGLANG = {Path("engines/sglang/tensors.py")}
"""They write pickles, because SGLang's API takes weights as such. The server reads them."""
READERS = {
    "Unpickler", "ProcessPoolExecutor", "read_pickle", "all_gather_object", "gather_object", "broadcast_object_list",
    "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip


def faults(source: str, writes: bool = False) -> Iterator[str]:
    """The faults of a source. writes: `pickle.dumps` and torch's reductions are allowed."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                modules = [module, *(f"{module}.{alias.name}" for alias in names)]
            case ast.Attribute(ast.Name("pickle"), name) if writes and name != "dumps":
                yield f"line {node.lineno}: pickle.{name}"
                continue
            case ast.Attribute(_, name) | ast.Name(name) if name in READERS:
                yield f"line {node.lineno}: {name}"
                continue
            case ast.Call(ast.Attribute(ast.Name("torch" | "np" | "numpy" | "yaml" as module), "load")):
                given = {word.arg: word.value for word in node.keywords}
                safe = given.get("weights_only" if module == "torch" else "allow_pickle")
                if not (isinstance(safe, ast.Constant) and safe.value is (module == "torch")) or module == "yaml":
                    yield f"line {node.lineno}: {module}.load"
                continue
            case _:
                continue
        refused = {module for module in modules if module in PICKLES or module.split(".")[0] in PICKLES}
        if writes:
            refused -= {"pickle", "torch.multiprocessing", "torch.multiprocessing.reductions"}
        yield from (f"line {node.lineno}: {module}" for module in sorted(refused))


def test_nothing_unpickles() -> None:
    package = ROOT / "headrace"
    faulty = {
        str(path.relative_to(package)): told
        for path in sorted(package.rglob("*.py"))
        if (told := list(faults(path.read_text(), path.relative_to(package) in SGLANG)))
    }
    assert faulty == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "import torch.multiprocessing as mp",
        "from torch import multiprocessing",
        "dist.all_gather_object(out, value)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "yaml.load(text)",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert list(faults(source))


def test_what_writes_for_sglang_may_not_read() -> None:
    assert not list(faults("import pickle\npickle.dumps(1)", writes=True))
    assert list(faults("import pickle\npickle.loads(b'')", writes=True))
