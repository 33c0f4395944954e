"""Builds a release into dist/: wheel, sdist, SBOM (CycloneDX) and SHA256SUMS, bit-identical when built again.

`make release` runs it. It builds an export of a commit, HEAD unless `--commit` names another, so files that are not
committed stay out. Times in the archives are the commit's (SOURCE_DATE_EPOCH). The SBOM lists the packages of the
environment that runs this, so identical files need the same packages (constraints.txt).
"""

import argparse
import gzip
import hashlib
import io
import sys
import tarfile
import tempfile
from pathlib import Path

from commit import ROOT, epoch, require_tag, resolved, run

SUMS = "SHA256SUMS"


def normalised(archive: bytes, moment: int) -> bytes:
    """A tar.gz with its entries sorted, and without the times, owners and modes of the machine that made it."""
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as source,
        gzip.GzipFile(filename="", fileobj=out, mode="wb", mtime=moment) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for entry in sorted(source.getmembers(), key=lambda one: one.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = moment, 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            entry.pax_headers = {}
            tar.addfile(entry, source.extractfile(entry) if entry.isfile() else None)
    return out.getvalue()


def build(out: Path, name: str = "HEAD") -> list[str]:
    """Write the release of a commit into a folder; the lines of SHA256SUMS."""
    commit = resolved(name)
    source = run("git", "show", f"{commit}:headrace/__init__.py").decode()
    require_tag(commit, source.partition('__version__ = "')[2].partition('"')[0])
    moment = epoch(commit)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        tree.mkdir()
        export = run("git", "archive", "--format=tar", commit)
        with tarfile.open(fileobj=io.BytesIO(export)) as tar:
            tar.extractall(tree, filter="tar")
        built = Path(scratch) / "built"
        words = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built))
        run(*words, cwd=tree, SOURCE_DATE_EPOCH=str(moment))
        for file in sorted(built.iterdir()):
            content = file.read_bytes()
            (out / file.name).write_bytes(normalised(content, moment) if file.suffix == ".gz" else content)
        bom = out / "headrace.cdx.json"
        listing = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON")
        run(*listing, "--pyproject", str(tree / "pyproject.toml"), "-o", str(bom), sys.executable, cwd=tree)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in sorted(out.iterdir())]
    (out / SUMS).write_text("".join(f"{line}\n" for line in lines))
    return lines


def main() -> None:
    """Build, and print the sums."""
    parser = argparse.ArgumentParser(description="wheel, sdist, SBOM and checksums of a commit")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--commit", default="HEAD")
    args = parser.parse_args()
    for line in build(args.out, args.commit):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
