"""A file of certificates that somebody made up is refused in one sentence, and certifies nothing."""

import random
from pathlib import Path

import msgspec
import pytest

from headrace.messages.judging import SuiteCertificates
from headrace.tasks import certificates, open_suite

ODD = (b"\xff", b'"\\ud800"', b"[" * 3000, b"1e999", b"9" * 5000, b"{}", b"null", b"-1", b"\x00", b"NaN")


@pytest.mark.parametrize("count", [200, pytest.param(5_000, marks=pytest.mark.slow)], ids=["some", "many"])
def test_forged_certificates_are_refused(tmp_path: Path, count: int) -> None:
    name, random_ = "generated/unseen", random.Random(2026)
    right = certificates.read(name, tmp_path)
    assert isinstance(right, SuiteCertificates)
    path = certificates.file_of(name, tmp_path / "certificates")
    path.parent.mkdir()
    true, refused = certificates.file_of(name, certificates.BUNDLED).read_bytes(), 0
    for number in range(count):
        forged = true
        for _ in range(random_.choice([1, 2, 5])):
            at = random_.randrange(min(len(forged), 4_000))
            forged = forged[:at] + random_.choice(ODD) + forged[at + random_.randrange(30) :]
        path.write_bytes(b"[" * 200_000 if number == 0 else b'{"x":' + b"[" * 200_000 if number == 1 else forged)
        try:
            read = certificates.read(name, tmp_path)
            assert read is not None and read.certificates == right.certificates  # `source` is compared with the suite's
        except ValueError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > count // 2
    path.write_bytes(true.replace(b'"rejected"', b'"certified"').replace(right.address.encode(), b"0" * 64))
    assert "was changed after it was written" in certificates.refusal(open_suite(name), tmp_path, False)


def test_a_task_at_risk_needs_an_opt_in(tmp_path: Path) -> None:
    suite = open_suite("generated/notes")
    right = certificates.read(suite.name, tmp_path)
    assert right is not None
    first, *others = right.certificates
    risky = [msgspec.structs.replace(first, risks=("its tests are a shell script",)), *others]
    certificates.write(suite, risky, tmp_path / "certificates")
    refused = certificates.refusal(suite, tmp_path, False)
    assert f"1 of {len(risky)} tasks" in refused and "its tests are a shell script" in refused
    assert refused.endswith("set [tasks] at_risk = true to train on it nevertheless")
    assert certificates.refusal(suite, tmp_path, False, at_risk=True) == ""
    assert certificates.wanting(suite, tmp_path) == {}, "another examination would find the same"
