"""Dockerfiles of tasks, built into the image store of this node: a task then names the image."""

from pathlib import Path

from headrace.tasks.importing.base import ImportOptions, ImportRefused
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import building
from headrace.vmhost.images.imported import Image

NAME = "Dockerfile"


def built(context: Path, options: ImportOptions) -> Image:
    """The image of a folder of a task, which the store may have already. ImportRefused with the builder's reason."""
    environment = options.environment
    stem = f"{context.resolve().parent.name}-{context.name}"
    try:
        cache = Path(environment.cache_dir).absolute()
        return building.of_folder(cache, context, stem, building.BuildOptions.of(environment), lambda line: None)
    except (VmhostError, OSError) as error:
        raise ImportRefused(f"{context.name}/{NAME}: {error}") from None
