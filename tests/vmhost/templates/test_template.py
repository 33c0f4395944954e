"""Templates are refused when they are not what they say, and images that do not boot say why."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.config import Environment
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import base as image
from headrace.vmhost.images import cpio, packages
from headrace.vmhost.node import doctor
from headrace.vmhost.qemu import probe, process
from headrace.vmhost.qemu.backend import CloneBackend
from headrace.vmhost.templates import template
from tests.support.paths import ROOT

CACHE = ROOT / ".cache" / "headrace"


def test_a_machine_without_qemu_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VmhostError, match="apt-get install qemu-system-x86 mmdebstrap"):
        image.ensure(Environment(cache_dir=str(tmp_path / "cache")))
    bad = [finding.text for finding in doctor.doctor(Environment(cache_dir=str(tmp_path))) if not finding.good]
    assert any("qemu-system-x86_64 is not installed" in text for text in bad)
    assert any("mmdebstrap is missing" in text for text in bad)


@pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed")
def test_the_doctor_looks_at_the_base_of_this_version_alone(tmp_path: Path) -> None:
    """A base of an earlier version was booted at every call, and its choice replaced the remembered one."""
    base = packages.folder(tmp_path)
    for folder in (base, *(tmp_path / f"base-{digit * 16}" for digit in "0123456789abcdef")):
        folder.mkdir()
        (folder / "done").touch()
    conditions = [
        process.version(),
        os.uname().release,
        probe._cpu(),
        probe._boot_id(),
        base.name,
        "auto",
        process.no_kvm(),
    ]
    choice = {"conditions": conditions, "accel": "tcg", "machine": "microvm", "why": "remembered"}
    (tmp_path / "probe.json").write_text(json.dumps(choice))
    texts = [finding.text for finding in doctor.doctor(Environment(cache_dir=str(tmp_path)))]
    assert "machines boot with tcg on microvm: remembered" in texts
    assert json.loads((tmp_path / "probe.json").read_text()) == choice


@pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed")
def test_the_first_check_of_a_machine_boots_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its `light.cpio` is missing, so a boot would fail."""
    base = packages.folder(tmp_path)
    base.mkdir()
    (base / "done").touch()
    findings = list(CloneBackend.requirements(Environment(cache_dir=str(tmp_path))))
    assert any(
        "no machine was booted here yet: `headrace vm run -- true` boots one" in finding.text for finding in findings
    )
    assert not (tmp_path / "probe.json").exists()


@pytest.mark.parametrize(("mode", "says"), [(0o600, "only root may open"), (0o660, ""), (0o666, "")])
def test_a_kvm_that_machines_may_not_open_says_what_to_change(tmp_path: Path, mode: int, says: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("who is not root runs machines as himself")
    device = tmp_path / "kvm"
    device.touch()
    device.chmod(mode)
    problem = process.no_kvm(str(device))
    assert says in problem and bool(problem) is bool(says)
    assert process.no_kvm(str(tmp_path / "none")) == f"no {tmp_path}/none"


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VmhostError, match=r"the cache folder .* can't be used"):
        image.ensure(Environment(cache_dir=str(tmp_path / "file" / "cache")))


@pytest.fixture(scope="module")
def made() -> template.Template:
    return image.ensure(Environment(cache_dir=str(CACHE)))["light"]


@pytest.fixture
def copy(made: template.Template, tmp_path: Path) -> Iterator[Path]:
    """A template folder whose files may be damaged; the memory image is linked until a test replaces it."""
    folder = tmp_path / made.folder.name
    folder.mkdir()
    for name in ("manifest.json", "state", "fixed"):
        shutil.copy(made.folder / name, folder / name)
        (folder / name).chmod(0o644)
    (folder / "ram").symlink_to(made.ram)
    yield folder


@pytest.mark.vm
def test_a_good_template_is_taken(made: template.Template, copy: Path) -> None:
    assert template.load(copy, made.manifest.key).manifest == made.manifest


@pytest.mark.vm
def test_damaged_templates_are_refused(made: template.Template, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = made.manifest.key
    with pytest.raises(template.UnusableTemplate, match="other parts"):
        template.load(copy, "0" * 16)
    state = (copy / "state").read_bytes()
    (copy / "state").write_bytes(state[:-1] + bytes([state[-1] ^ 1]))
    with pytest.raises(template.UnusableTemplate, match="device state was changed"):
        template.load(copy, key)
    (copy / "state").write_bytes(state)
    (copy / "fixed").write_bytes(b"")
    with pytest.raises(template.UnusableTemplate, match="list of fixed pages was changed"):
        template.load(copy, key)
    shutil.copyfile(made.folder / "fixed", copy / "fixed")
    monkeypatch.setattr(process, "tsc_khz", lambda: made.manifest.tsc_khz * 2)
    if made.manifest.hardware.accel == "tcg":
        with pytest.raises(template.UnusableTemplate, match="clock"):
            template.load(copy, key)
    (copy / "ram").unlink()
    (copy / "ram").write_bytes(b"\0" * 4096)
    with pytest.raises(template.UnusableTemplate, match="memory image was changed"):
        template.load(copy, key)
    (copy / "manifest.json").write_text("{}")
    with pytest.raises(template.UnusableTemplate, match="cannot be read"):
        template.load(copy, key)


@pytest.mark.vm
@pytest.mark.slow  # makes a template twice; that such a one is refused is checked above
def test_a_truncated_template_is_made_again(made: template.Template, tmp_path: Path) -> None:
    """In a cache of its own, which borrows the base image and what the probe found."""
    for source in (*CACHE.glob("base-*"), CACHE / "probe.json"):
        (tmp_path / source.name).symlink_to(source)
    environment = Environment(cache_dir=str(tmp_path), slots_per_vm=1)
    said: list[str] = []
    first = image.ensure(environment, said.append)["light"]
    assert not any("refused" in line for line in said)
    first.ram.chmod(0o644)
    with first.ram.open("r+b") as ram:
        ram.truncate(1 << 20)
    second = image.ensure(environment, said.append)["light"]
    assert any("refused, made again: its memory image was changed" in line for line in said)
    assert second.ram.stat().st_size == second.manifest.ram_bytes == first.manifest.ram_bytes


@pytest.mark.slow  # it waits for a kernel that finds no system
@pytest.mark.vm
def test_an_image_that_does_not_boot_shows_its_serial_log(
    made: template.Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = packages.folder(CACHE)
    broken = tmp_path / base.name
    broken.mkdir()
    for name in ("vmlinuz", "done"):
        (broken / name).symlink_to(base / name)
    (broken / "light.cpio").write_bytes(b"")
    hardware = msgspec.structs.replace(made.manifest.hardware, ports=2)
    with pytest.raises(VmhostError, match=r"does not boot .*serial log .*panic"):
        asyncio.run(template.build("light", broken, hardware, 1, tmp_path / "t", made.manifest.qemu))
    assert not list(tmp_path.glob("making-*"))
    assert "panic" in (tmp_path / "last-failed-boot.log").read_text()


HANGS = b"#!/bin/busybox sh\necho headrace: what is this place\nwhile :; do busybox sleep 1000; done\n"


@pytest.mark.vm
@pytest.mark.slow
def test_an_image_that_comes_up_and_says_nothing_is_given_up_in_time(
    made: template.Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = packages.folder(CACHE)
    broken = tmp_path / base.name
    broken.mkdir()
    for name in ("vmlinuz", "done"):
        (broken / name).symlink_to(base / name)
    entries = [cpio.folder(name) for name in ("bin", "usr", "usr/bin")]
    entries += [cpio.file("bin/busybox", probe._busybox(base), 0o755), cpio.file("usr/bin/python3", HANGS, 0o755)]
    with (broken / "light.cpio").open("wb") as out:
        cpio.write(out, entries)
    monkeypatch.setitem(template.BOOT_S, made.manifest.hardware.accel, 25.0)
    hardware = msgspec.structs.replace(made.manifest.hardware, ports=2)
    with pytest.raises(VmhostError, match=r"does not boot .*: no answer in 25 s; serial log .*what is this place"):
        asyncio.run(template.build("light", broken, hardware, 1, tmp_path / "t", made.manifest.qemu))
    assert not list(tmp_path.glob("making-*")) and not (tmp_path / "t").exists()
