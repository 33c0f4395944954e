"""Base images of tests: busybox for a Dockerfile ``FROM scratch``, and images that buildah makes of an archive."""

from pathlib import Path

from headrace.vmhost.images import building, packages
from headrace.vmhost.images.imported import Image, Request
from headrace.vmhost.qemu import probe
from tests.support.archives import Members, layer
from tests.support.hosts import CACHE

NAMES = ("sh", "cat", "chmod", "cp", "echo", "find", "grep", "ls", "mkdir", "rm", "sed", "sleep", "test")


def busybox(root: Path) -> None:
    """Put busybox below a folder."""
    programs = root / "bin"
    programs.mkdir(parents=True)
    (programs / "busybox").write_bytes(probe._busybox(packages.folder(Path(CACHE))))
    (programs / "busybox").chmod(0o755)
    for name in NAMES:
        (programs / name).symlink_to("busybox")


def built(cache: Path, context: Path, name: str, reference: str, members: Members, *lines: str) -> Image:
    """An image of these files, by which a Dockerfile can begin: ``FROM reference``. lines: of its own Dockerfile."""
    context.mkdir(parents=True)
    (context / "root.tar").write_bytes(layer(members))
    (context / "Dockerfile").write_text("\n".join(("FROM scratch", "ADD root.tar /", *lines, "")))
    return building.build(cache, context, Request(name=name), building.BuildOptions(reference=reference), print)
