"""API keys: only hashes on the disk, changes seen by a reader that is open, rates by bucket."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.gateway.tenants.keys import ApiKeys, KeyFileError
from headrace.gateway.tenants.limits import RateLimit, retry_after
from tests.support.paths import ROOT


def test_the_file_holds_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = ApiKeys(path).add("acme")
    assert key.removeprefix("hr-") not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_reader_sees_what_another_process_changes(tmp_path: Path) -> None:
    reader, writer = ApiKeys(tmp_path / "keys.json"), ApiKeys(tmp_path / "keys.json")
    assert reader.find("hr-none") is None
    first, second = writer.add("acme", training=True), writer.add("other", requests_per_minute=3)
    first_entry = reader.find(first)
    assert first_entry is not None and first_entry.tenant == "acme" and first_entry.training
    assert [entry.tenant for entry in reader.entries()] == ["acme", "other"]
    writer.revoke(first_entry.id)
    assert reader.find(first) is None and reader.find(second) is not None


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(KeyFileError, match="headrace keys"):
        ApiKeys(path).revoke("12345678")
    path.write_text("{]")
    with pytest.raises(KeyFileError, match="not a file of API keys"):
        ApiKeys(path).find("hr-x")


def test_a_bucket_refills(tmp_path: Path) -> None:
    now = 0.0
    limit = RateLimit(burst_s=2.0, clock=lambda: now)
    assert [limit.take("k", 60) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert limit.take("other", 60) == 0.0
    now = 1.0
    assert limit.take("k", 60) == 0.0 and limit.take("k", 60) == pytest.approx(1.0)
    assert retry_after(0.2) == "1" and retry_after(1.2) == "2"


def test_keys_that_several_processes_make_at_once_are_all_kept(tmp_path: Path) -> None:
    """`headrace up` makes one while an operator makes another."""
    script = (
        "import sys; from pathlib import Path; from headrace.gateway.tenants.keys import ApiKeys; sys.stdin.read()\n"
        "for number in range(20): ApiKeys(Path(sys.argv[1])).add('acme')"
    )
    path = tmp_path / "keys.json"
    argv = [sys.executable, "-c", script, str(path)]
    makers = [subprocess.Popen(argv, stdin=subprocess.PIPE, cwd=ROOT) for _ in range(3)]
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.close()  # all begin
    assert [maker.wait() for maker in makers] == [0, 0, 0]
    assert len(ApiKeys(path).entries()) == 60
