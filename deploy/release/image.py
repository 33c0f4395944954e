"""Builds a container image of a commit of headrace into dist/, without Docker: an OCI archive, its digest and its SBOM.

`make image` runs it, as root. The root holds Debian's packages and a virtual environment in /opt/headrace with the
wheel of `make release`, the packages of constraints.txt and the broker; buildah makes the image of it. Every time in it
is the commit's (SOURCE_DATE_EPOCH), and modules are compiled with the hashes of their sources, not their times. Equal
bits need equal packages: constraints.txt pins every Python package, and `--wheels` keeps them in a folder and installs
from it alone the next time. Debian's packages are those of its archive on that day; the SBOM
(CycloneDX) lists their versions beside the wheels, and labels of the image hold those of the packages asked for.

Trade-off: one layer of 1.5 GB, most of it torch, which keeps the recipe in this one file. Nodes with GPUs need torch's
CUDA build in it: `--pip-args` names the index. SGLang has an image of its own (docs/sglang.md).
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import bom
from commit import ROOT, epoch, resolved, run

from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import packages

HERE = Path(__file__).resolve().parent
DEBIAN = ("python3", "python3-venv", "ca-certificates", "qemu-system-x86", "mmdebstrap", "cpio")
EXTRAS = "acp,mcp"
USER = 10001
"""The user of the pods that `headrace deploy k8s` describes."""
INSTALL = f"""
set -e
python3 -m venv /opt/headrace
/opt/headrace/bin/pip install --quiet --no-index --no-compile --find-links /opt/wheels "headrace[{EXTRAS}]"
rm -rf /opt/wheels /root/.cache
/opt/headrace/bin/python -m compileall -qq --invalidation-mode unchecked-hash /opt/headrace/lib || true
useradd --uid {USER} --user-group --home-dir /var/lib/headrace --create-home --skel /nonexistent headrace
"""
"""Some packages hold a few files for newer Pythons, which compileall reports by its exit code."""


def wheels(folder: Path, commit: str, pip_args: Sequence[str], stock: Path | None) -> str:
    """Put headrace's wheel and all that it needs into a folder. Returns headrace's version.

    stock: if this folder exists, pip takes packages from it alone; otherwise it is created with the packages of this
    build. SystemExit when the stock lacks a package.
    """
    release = folder.parent / "release"
    run(sys.executable, str(HERE / "build.py"), "--out", str(release), "--commit", commit)
    (wheel,) = release.glob("headrace-*.whl")
    stocked = stock is not None and stock.is_dir()
    source = ("--no-index", "--find-links", str(stock)) if stocked else tuple(pip_args)
    words = ("-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(folder))
    run(sys.executable, *words, "-c", str(ROOT / "constraints.txt"), *source, f"{wheel}[{EXTRAS}]")
    if stock is not None and not stocked:
        shutil.copytree(folder, stock, ignore=shutil.ignore_patterns(wheel.name))
    return wheel.name.split("-")[1]


def root(tar: Path, wheelhouse: Path) -> None:
    """The root of the image as an archive."""
    hooks = (f'copy-in "{wheelhouse}" /opt', f'chroot "$1" sh -c {shlex.quote(INSTALL)}')
    try:
        packages.download(tar, DEBIAN, "--variant=minbase", *(f"--customize-hook={hook}" for hook in hooks))
    except VmhostError as error:
        raise SystemExit(f"image: {error}") from None


def set_times(archive: Path, moment: int) -> None:
    """Set the time of every entry of an archive: buildah writes the build's time. Blobs keep their names and bytes."""
    rewritten = archive.with_suffix(".new")
    with tarfile.open(archive) as source, tarfile.open(rewritten, "w", format=tarfile.PAX_FORMAT) as target:
        for entry in sorted(source.getmembers(), key=lambda entry: entry.name):
            entry.mtime, entry.pax_headers = moment, {}
            target.addfile(entry, source.extractfile(entry) if entry.isfile() else None)
    rewritten.replace(archive)


def build(out: Path, pip_args: Sequence[str], name: str = "HEAD", stock: Path | None = None) -> tuple[Path, Path, str]:
    """Write the image of a commit and its SBOM into a folder. Returns archive, SBOM and the image's digest."""
    if os.geteuid() != 0 or shutil.which("buildah") is None:
        raise SystemExit("image: expected root and buildah: apt-get install buildah")
    commit = resolved(name)
    moment = str(epoch(commit))
    os.environ["SOURCE_DATE_EPOCH"] = moment  # for mmdebstrap, pip and the wheel
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix="making-") as scratch:
        place = Path(scratch)
        version = wheels(place / "wheels", commit, pip_args, stock)
        root(place / "root.tar", place / "wheels")
        debian = bom.debian_packages(place / "root.tar")
        labels = bom.labels(debian, DEBIAN, version, commit).items()
        buildah = ("buildah", "--storage-driver", "vfs", "--root", f"{place}/store", "--runroot", f"{place}/run")
        words = ("--isolation", "chroot", "--timestamp", moment, "--iidfile", f"{place}/id")
        words += tuple(f"--label={key}={value}" for key, value in labels)
        run(*buildah, "bud", *words, "--file", str(HERE / "Containerfile"), str(place))
        made = (place / "id").read_text().strip()
        archive = out / f"headrace-{version}.oci.tar"
        archive.unlink(missing_ok=True)
        run(*buildah, "push", "--digestfile", f"{place}/digest", made, f"oci-archive:{archive}:headrace:{version}")
        set_times(archive, int(moment))
        digest = (place / "digest").read_text().strip()
        run(*buildah, "rmi", "--all", "--force")
        bill = out / f"headrace-{version}.image.cdx.json"
        bill.write_bytes(
            bom.document(
                debian,
                (place / "wheels").iterdir(),
                version=version,
                commit=commit,
                moment=int(moment),
                release=packages.DEBIAN_RELEASE,
            )
        )
    return archive, bill, digest


def main() -> None:
    """Build, and print the archive, its size, its SBOM and the image's digest as JSON."""
    parser = argparse.ArgumentParser(description="a container image of a commit")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--pip-args", default="", help="further arguments for pip, for example an index")
    parser.add_argument("--wheels", type=Path, help="folder of an earlier build's packages; may be new")
    parser.add_argument("--commit", default="HEAD")
    args = parser.parse_args()
    archive, bill, digest = build(args.out.resolve(), shlex.split(args.pip_args), args.commit, args.wheels)
    line = {"archive": str(archive), "sbom": str(bill), "digest": digest, "mib": archive.stat().st_size >> 20}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
