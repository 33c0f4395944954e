"""The line that the commands of `headrace images` print about an image."""

from typing import TYPE_CHECKING

import msgspec

from headrace.launch.output import say_report

if TYPE_CHECKING:
    from headrace.vmhost.images.imported import Image


class ImageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an image that the commands print."""

    name: str
    digest: str
    tags: tuple[str, ...]
    mib: float
    entries: int
    layers: int
    blobs: tuple[str, ...]
    """Digest and size of each file that holds a part of the image."""
    workdir: str
    user: str
    memory_mb: int


def show(image: "Image") -> None:
    """Print the description of an image as one JSON line."""
    report = ImageReport(
        name=image.name,
        digest=image.digest,
        tags=image.tags,
        mib=round(image.bytes / (1 << 20), 1),
        entries=image.entries,
        layers=len(image.layers),
        blobs=tuple(f"{part.blob[:16]} {part.bytes / (1 << 20):.1f} MiB" for part in image.segments()),
        workdir=image.workdir,
        user=f"{image.uid}:{image.gid}",
        memory_mb=image.memory_mb,
    )
    say_report(report)
