"""`headrace images`: stores container images for the sandboxes of this host, and lists them."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import add_config, integer
from headrace.launch.output import complain, say, say_report
from headrace.launch.runs import RunError
from headrace.terminal_text import plain

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.vmhost.images.imported import Image
    from headrace.vmhost.images.skopeo import Copying


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


def show_image(image: "Image") -> None:
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


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("images", help="store a container image; list the store")
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="reference with its tag, such as docker.io/org/app:1.2; archive (docker save, OCI layout) or root "
        "file system; docker-daemon:NAME:TAG or containers-storage:NAME:TAG by skopeo; Dockerfile or its folder; "
        "pull: with --suite",
    )
    parser.add_argument(
        "--suite", action="append", metavar="NAME", help="pull: the images of its tasks and verifiers; may be repeated"
    )
    parser.add_argument(
        "--registry",
        action="append",
        default=[],
        metavar="FROM=TO",
        help="copy references that begin with FROM (docker.io/org) from TO (mirror:5000/org)",
    )
    parser.add_argument("--parallel", type=integer(1), default=4, help="pull: images at once; default: 4")
    parser.add_argument("--name", default="", help="name of the image in the store; default: from its tag or file name")
    parser.add_argument(
        "--tag",
        default="",
        help="the image to import from an archive of several; of a Dockerfile: the reference by "
        "which tasks may name the image, default: NAME:latest",
    )
    parser.add_argument("--memory-mb", type=integer(64), default=0, help="memory of the image's machines; default: 512")
    parser.add_argument("--file", default="", help="the Dockerfile, relative to the folder")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="value of an ARG")
    parser.add_argument("--timeout-s", type=integer(1), default=3600, help="time limit of a build or a copy in seconds")
    parser.add_argument("--verify", action="store_true", help="list: read every blob and compare it with its digest")
    add_config(parser)
    parser.set_defaults(handler=images)


def images(args: argparse.Namespace) -> int:
    """Store the image and print its description as a JSON line; without a source list the images."""
    from headrace.vmhost.images import building, imported, skopeo

    environment = args.settings.environment
    cache = Path(environment.cache_dir).absolute()
    if args.source is None:
        return list_images(cache, verify=args.verify)
    places = dict(each.split("=", 1) for each in args.registry if "=" in each.strip("="))
    if len(places) < len(args.registry):
        raise RunError(f"--registry expects FROM=TO, each FROM once, got {' '.join(args.registry)}")
    copying = skopeo.Copying(insecure=environment.insecure_registries, timeout_s=args.timeout_s, places=places)
    if (args.source == "pull") != bool(args.suite):
        raise RunError("--suite belongs to pull: headrace images pull --suite NAME")
    if args.suite:
        return pull(args, cache, copying)
    path, memory = Path(args.source), args.memory_mb or imported.MEMORY_MB
    request = imported.Request(name=args.name, memory_mb=memory)
    if args.file or building.is_recipe(path):
        options = building.BuildOptions.of(
            environment,
            file=args.file,
            reference=args.tag,
            arguments=tuple(args.build_arg),
            timeout_s=args.timeout_s,
        )
        show_image(building.build(cache, path, request, options, _tell_line))
    elif path.exists() or ":" not in args.source:
        show_image(imported.take(cache, path, args.name, args.tag, memory))
    else:
        show_image(skopeo.take(cache, args.source, request, copying, complain))
    return 0


def pull(args: argparse.Namespace, cache: Path, copying: "Copying") -> int:
    """Store the images that suites name and the store lacks; 1 when one could not be stored."""
    from headrace.cli.tasks.suites import images_of
    from headrace.launch import admission
    from headrace.tasks import open_suite
    from headrace.tasks.certificates import sample_of
    from headrace.vmhost.images import skopeo

    opened = [open_suite(admission.suite(name), args.settings.tasks.dir) for name in args.suite]
    named = sorted(set[str]().union(*(images_of(suite, sample_of(suite)) for suite in opened)))
    failed = skopeo.take_all(cache, named, copying, args.parallel, complain)
    for reason in failed.values():
        complain(reason)
    say(f"{len(named) - len(failed)} of {len(named)} images of {', '.join(args.suite)} are stored")
    return 1 if failed else 0


def _tell_line(line: str) -> None:
    sys.stderr.write(f"{plain(line)}\n")


def list_images(cache: Path, *, verify: bool) -> int:
    """Print the images; exit code 1 when one is damaged."""
    from headrace.vmhost.errors import VmhostError
    from headrace.vmhost.images import imported, store

    code = 0
    checked: dict[str, bool] = {}
    for name in imported.names(cache):
        image = imported.find(cache, name)
        try:
            if image is None:
                raise VmhostError(f"the description of image {name} is damaged: store it again")
            show_image(image)
            for part in image.segments() if verify else ():
                if part.folder not in checked:
                    checked[part.folder] = store.intact(part)
                if not checked[part.folder]:
                    raise VmhostError(
                        f"{part.path} was changed: run `headrace vm gc --forget {name}`, then store it again"
                    )
        except VmhostError as error:
            complain(str(error))
            code = 1
    return code
