"""The guests' files: Debian packages, unpacked and packed into initramfs archives.

mmdebstrap with ``--variant=extract`` downloads and unpacks without running a single maintainer script: 8 s instead of
55 s for an installed tree (measured), without root's rights in principle, and the tree holds no output of a script.
This module makes the results that a guest needs: users, byte code (by the guest's own interpreter), links.

Two flavours come from one download. ``light``: kernel, Python with its standard library, busybox. ``debian``: that and
bash, coreutils, git, ripgrep, pytest, and ruff from PyPI. Both are roots in RAM: no disk to snapshot, no file system to
mount, and the pages of the root are shared by all clones like the rest of the template.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from headrace import timed_commands
from headrace.archives import zips
from headrace.archives.members import ArchiveLimits, ArchiveRefused
from headrace.python_modules import module_command
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import cpio

Say = Callable[[str], None]

_PACKAGES = (
    *("linux-image-cloud-amd64", "busybox-static", "python3", "python3-pytest", "git", "ripgrep", "bash", "dash"),
    *("coreutils", "findutils", "grep", "sed", "diffutils", "patch", "tar", "gzip", "procps", "mawk"),
)
DEBIAN_RELEASE = "bookworm"
"""The release of every root that is made here."""
_RUFF = "ruff==0.17.5"
"""The linter, which Debian does not have: its wheel holds one program."""
_WHEEL = ArchiveLimits(files=1000, size=256 << 20)
_RECIPE = 6
"""Raised when the rules below change, so that cached images are made again."""
MODULES = ("virtio_ring", "virtio", "virtio_mmio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci")
CONSOLE = "virtio_console"
OVERLAY = "overlay"
DRIVES = ("virtio_blk", "libcrc32c", "erofs", OVERLAY)
"""Modules of a machine with drives, each after those that it needs; ext4 is built in."""
FLAVOURS = ("light", "debian")
_DRIVE_FILES = frozenset(f"lib/modules/{module}.ko" for module in DRIVES)
TOOL_UID, KEEPER_UID = 20100, 20200
SLOTS_MAX = 16
DOWNLOAD_S, COMPILE_S = 1800.0, 600.0
"""Limits of the build's downloads, which take minutes on a slow line, and of its other commands."""
END_S = 10.0
"""How long mmdebstrap may take to remove its files after SIGTERM."""

_PYTHON = "usr/lib/python3.11/"
_NOWHERE = re.compile(
    r"(boot|dev|proc|sys|run|tmp|home|root|media|mnt|srv|opt|var)(/|$)|usr/(share|include|games|local|src)(/|$)"
    r"|(usr/)?lib/(udev|systemd|modprobe\.d|modules|modules-load\.d|sysusers\.d|tmpfiles\.d)(/|$)"
    r"|usr/lib/(apt|dpkg|gcc|init|kernel|locale|mime|pam\.d|tmpfiles|x86_64-linux-gnu/(perl|perl-base|gconv|krb5))(/|$)"
    r"|etc/(apt|init\.d|initramfs-tools|kernel|pam\.d|security|systemd|udev|cron|logrotate|perl|dpkg|skel)"
    r"|usr/lib/python3\.11/(test|idlelib|lib2to3|ensurepip|turtledemo|tkinter|distutils|pydoc_data|config-3)"
    r"|.*/(__phello__|_test\w*|_xxtest\w*|_ctypes_test|xxlimited\w*)[./]"
    r"|(usr/)?(lib|sbin|bin)/(.*/)?(libperl|libdb-|perl|apt|dpkg|udevadm|scalar|git-shell|git-upload|git-receive)"
    r"|.*/(git-(http|imap|daemon|remote|shell|sh-i18n|credential)[^/]*)$"
)
_LIGHT = re.compile(
    r"bin/busybox$|usr/bin/python3(\.11)?$|usr/lib/python3(\.11)?/(?!dist-packages)|etc/(host\.conf|debian_version)$"
    r"|lib64/|(usr/)?lib/x86_64-linux-gnu/(ld-linux-x86-64|lib(c|m|z|expat|ffi|bz2|lzma|uuid|crypt|dl|pthread|rt|util))"
    r"(\.so|-)"
)
_LIGHT_NOT = re.compile(r".*/(_ssl|_hashlib|_sqlite3|_curses|_dbm|readline|nis|ossaudiodev|_codecs_\w+)[.\w-]*\.so$")


def folder(cache: Path) -> Path:
    """The folder of the base that this version's rules give, whether it was made or not."""
    recipe = json.dumps([_RECIPE, _PACKAGES, _RUFF, _NOWHERE.pattern, _LIGHT.pattern, _LIGHT_NOT.pattern])
    return cache / f"base-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"


def base(cache: Path, say: Say) -> Path:
    """The folder with ``vmlinuz`` and the archives light, debian and drives; made where it is missing. VmhostError."""
    wanted = folder(cache)
    if (wanted / "done").exists():
        return wanted
    if shutil.which("mmdebstrap") is None:
        raise VmhostError("mmdebstrap is missing, which makes the guest image: apt-get install mmdebstrap")
    say("guest image: fetching Debian packages (once, about half a minute)")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as making:
        work = Path(making)
        download(work / "base.tar", _PACKAGES, "--variant=extract")
        tree, target = work / "tree", work / "out"
        tree.mkdir()
        target.mkdir()
        say("guest image: compiling the standard library and packing")
        with tarfile.open(work / "base.tar") as tar:
            release = _unpack(tar, tree, target)
        _linter(work, tree)
        _compile(tree)
        for flavour in FLAVOURS:
            with (target / f"{flavour}.cpio").open("wb") as out:
                cpio.write(out, _entries(tree, flavour))
        with (target / "drives.cpio").open("wb") as out:
            cpio.write(out, _drives(tree))
        (target / "done").write_text(json.dumps({"kernel": release, "packages": _PACKAGES}))
        shutil.rmtree(wanted, ignore_errors=True)
        target.rename(wanted)
    return wanted


def kernel_release(base: Path) -> str:
    """Version of the guest kernel in a base folder."""
    return str(json.loads((base / "done").read_text())["kernel"])


def download(tar: Path, packages: Sequence[str], *words: str) -> None:
    """A root of Debian packages as an archive. Tries the machine's default mirror, then whatever its own apt is
    configured with. words: further arguments for mmdebstrap. VmhostError."""
    command = ["mmdebstrap", "--quiet", *words, f"--include={','.join(packages)}", DEBIAN_RELEASE, str(tar)]
    sources = [p for p in ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list") if _has_release(p)]
    for mirrors in ([], *([source] for source in sources)):
        done = _run([*command, *mirrors], DOWNLOAD_S, "check that the mirrors in /etc/apt answer")
        if done.returncode == 0:
            return
        tar.unlink(missing_ok=True)
    lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    raise VmhostError(f"the guest image could not be made: mmdebstrap: {' | '.join(lines[-3:])}")


def _linter(work: Path, tree: Path) -> None:
    """Put ruff into the tree. VmhostError."""
    command = module_command("pip", "download", "-q", "--no-deps", "--only-binary=:all:")
    command += ["--platform", "manylinux2014_x86_64", "-d", str(work), _RUFF]
    done = _run(command, DOWNLOAD_S, "check that the index that `pip config list` shows answers")
    wheels = list(work.glob("ruff-*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        raise VmhostError(f"the guest image could not be made: pip download {_RUFF}: {' | '.join(lines[-2:])}")
    target = tree / "usr/bin/ruff"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with wheels[0].open("rb") as wheel, target.open("wb") as out:
            out.writelines(zips.only(wheel, ".data/scripts/ruff", _WHEEL).pieces)
    except ArchiveRefused as error:
        raise VmhostError(f"the guest image could not be made: {wheels[0].name}: {error}") from None
    target.chmod(0o755)


def _has_release(path: str) -> bool:
    try:
        return DEBIAN_RELEASE in Path(path).read_text()
    except OSError:
        return False


def _unpack(tar: tarfile.TarFile, tree: Path, target: Path) -> str:
    """Put the files that a guest needs into the tree and the kernel into the target. Returns the kernel's version."""
    release = ""
    for member in tar:
        name = member.name.removeprefix("./").rstrip("/")
        if name.startswith("boot/vmlinuz-"):
            release = name.removeprefix("boot/vmlinuz-")
            source = tar.extractfile(member)
            assert source is not None
            (target / "vmlinuz").write_bytes(source.read())
        module = name.rpartition("/")[2].removesuffix(".ko")
        wanted = name.endswith(".ko") and module in (*MODULES, CONSOLE, *DRIVES)
        if not name or (_NOWHERE.match(name) and not wanted):
            continue
        path = tree / (f"lib/modules/{module}.ko" if wanted else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if member.isdir():
            path.mkdir(exist_ok=True)
        elif member.issym():
            path.symlink_to(member.linkname)
        elif member.islnk():
            path.symlink_to("/" + member.linkname.removeprefix("./"))
        elif member.isfile():
            source = tar.extractfile(member)
            assert source is not None
            with path.open("wb") as out:
                shutil.copyfileobj(source, out)
            path.chmod(member.mode & 0o755)
    if not release:
        raise VmhostError("the guest image has no kernel: linux-image-cloud-amd64 brought no /boot/vmlinuz")
    return release


def _compile(tree: Path) -> None:
    """Byte code for every module, by the guest's interpreter run through its own loader: the host's may differ."""
    libraries = ":".join(str(tree / part) for part in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"))
    loader = tree / "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
    python = [str(loader), "--library-path", libraries, str(tree / "usr/bin/python3.11"), "-S", "-B"]
    folders = [tree / _PYTHON.rstrip("/"), tree / "usr/lib/python3/dist-packages"]
    # Never checked against the source: the root is read-only, and every check costs a stat under emulation.
    words = ["-m", "compileall", "-q", "-s", str(tree), "-p", "/", "--invalidation-mode", "unchecked-hash"]
    words += [str(folder) for folder in folders if folder.exists()]
    environment = {"PYTHONHOME": str(tree / "usr"), "PATH": "/usr/bin:/bin"}
    done = _run([*python, *words], COMPILE_S, "build it while the machine has less load", env=environment)
    if done.returncode != 0 and not list((tree / _PYTHON).glob("__pycache__/os.*.pyc")):
        said = (done.stderr or done.stdout).decode("utf-8", "replace")
        raise VmhostError(f"the guest's Python does not run here: {said[-300:]}")


def _entries(tree: Path, flavour: str) -> Iterator[cpio.Entry]:
    """Everything of one flavour, folders first, owned by root."""
    users = [("root", 0, "/root"), ("nobody", 65534, "/nonexistent")]
    for slot in range(SLOTS_MAX + 1):
        users += [("agent", TOOL_UID + slot, "/tmp"), ("keeper", KEEPER_UID + slot, "/nonexistent")]
    passwd = "".join(f"{name}:x:{uid}:{uid}::{home}:/bin/sh\n" for name, uid, home in users)
    group = "".join(f"{name}:x:{uid}:\n" for name, uid, _ in users)
    for name in ("dev", "proc", "sys", "run", "tmp", "root", "etc", "bin", "usr", "usr/bin", "usr/lib", "workspace"):
        yield cpio.folder(name)
    yield cpio.file("etc/passwd", passwd.encode())
    yield cpio.file("etc/group", group.encode())
    yield cpio.file("etc/hostname", b"sandbox\n")
    yield cpio.file("etc/hosts", b"127.0.0.1 localhost sandbox\n")
    yield cpio.file("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files\n")
    if flavour == "debian":
        yield cpio.link("usr/bin/awk", "mawk")
    else:
        for applet in sorted(_applets(tree)):
            yield cpio.link(f"bin/{applet}", "busybox")
    seen = {"etc/hostname", "etc/hosts", "etc/passwd", "etc/group", "etc/nsswitch.conf"}
    made = {"dev", "proc", "sys", "run", "tmp", "root", "etc", "bin", "usr", "usr/bin", "usr/lib", "workspace"}
    for path in sorted(tree.rglob("*")):
        name = str(path.relative_to(tree))
        if name in _DRIVE_FILES:
            continue
        ours = name.startswith("lib/modules/") or flavour == "debian" or _LIGHT.match(name)
        if path.is_dir() and not path.is_symlink():
            continue
        if not ours or name in seen or (flavour == "light" and _LIGHT_NOT.match(name)):
            continue
        for parent in reversed(Path(name).parents):
            if str(parent) != "." and str(parent) not in made:
                made.add(str(parent))
                yield cpio.folder(str(parent))
        if path.is_symlink():
            yield cpio.link(name, os.readlink(path))
        else:
            yield cpio.file(name, path.read_bytes(), stat.S_IMODE(path.stat().st_mode) | 0o444)


def _drives(tree: Path) -> Iterator[cpio.Entry]:
    """The modules of machines with drives, which other machines do not get."""
    for name in sorted(_DRIVE_FILES):
        if not (tree / name).is_file():
            raise VmhostError(f"the guest image has no {name}: linux-image-cloud-amd64 did not bring it")
        yield cpio.file(name, (tree / name).read_bytes())


def _applets(tree: Path) -> set[str]:
    """Names that the guest's busybox answers to."""
    listed = _run([str(tree / "bin/busybox"), "--list"], COMPILE_S, "build it while the machine has less load")
    if listed.returncode:
        raise VmhostError(f"the guest's busybox does not run here: it ended with code {listed.returncode}")
    return set(listed.stdout.decode().split()) - {"busybox", "python3"}


def _run(
    argv: Sequence[str], limit_s: float, hint: str, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """One command of the build. VmhostError with the hint when it takes longer than `limit_s` seconds."""
    try:
        return timed_commands.run(argv, limit_s, env=env, end_s=END_S)
    except subprocess.TimeoutExpired:
        raise VmhostError(
            f"the guest image could not be made: {Path(argv[0]).name} did not end within {limit_s:g} s: {hint}"
        ) from None
