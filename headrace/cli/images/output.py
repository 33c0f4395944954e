"""The line that the commands of `headrace images` print about an image."""

import json
from typing import TYPE_CHECKING

from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.vmhost.images.imported import Image


def show(image: "Image") -> None:
    """One JSON line."""
    fields: dict[str, object] = {
        "name": image.name,
        "digest": image.digest,
        "tags": image.tags,
        "mib": round(image.bytes / (1 << 20), 1),
        "entries": image.entries,
        "layers": len(image.layers),
        "blobs": [f"{part.blob[:16]} {part.bytes / (1 << 20):.1f} MiB" for part in image.segments()],
        "workdir": image.workdir,
        "user": f"{image.uid}:{image.gid}",
        "memory_mb": image.memory_mb,
    }
    say(json.dumps(fields))
