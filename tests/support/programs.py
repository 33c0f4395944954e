"""Programs of this machine as members of an image: each with its libraries, so that a test's image needs no base."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.support.archives import Members, file, folder, link


def programs(*names: str, modules: Iterable[Path] = ()) -> Members:
    """``/bin/NAME`` for every name, ``/bin/sh`` among them, and the libraries that they and the modules load."""
    places = {name: Path(found).resolve() for name in ("sh", *names) if (found := shutil.which(name))}
    assert len(places) == len(set(names)) + 1, f"this machine lacks some of {names}"
    libraries: dict[str, Path] = {}
    for place in (*places.values(), *modules):
        told = subprocess.run(["ldd", str(place)], check=True, capture_output=True, text=True).stdout
        libraries |= {path: Path(path).resolve() for path in re.findall(r"(/\S+)", told)}
    folders = {str(parent).lstrip("/") for path in libraries for parent in Path(path).parents if str(parent) != "/"}
    return [
        folder("bin"),
        *(folder(name) for name in sorted(folders - {"bin"})),
        *(file(f"bin/{name}", place.read_bytes(), mode=0o755) for name, place in places.items()),
        *(file(path.lstrip("/"), place.read_bytes(), mode=0o755) for path, place in sorted(libraries.items())),
    ]


def tree(root: Path, prefix: str, **fields: int) -> Members:
    """A folder of this machine as members below `prefix`."""
    paths = sorted(root.rglob("*"))
    inner = ((f"{prefix}/{path.relative_to(root)}", path) for path in paths)
    members = [
        folder(name, **fields)
        if path.is_dir()
        else link(name, str(path.readlink()))
        if path.is_symlink()
        else file(name, path.read_bytes(), **fields)
        for name, path in inner
    ]
    return [folder(prefix, **fields), *members]
