"""`headrace keys`: made, listed and revoked through the command line."""

from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.gateway.tenants.keys import ApiKeys


def test_a_key_from_its_making_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--set", f"run.dir={tmp_path}"]
    assert main(["keys", "--add", "acme", "--training", "--rate", "30", *where]) == 0
    key = capsys.readouterr().out.strip()
    entry = ApiKeys(tmp_path / "keys.json").find(key)
    assert entry is not None and entry.training and entry.requests_per_minute == 30
    assert main(["keys", *where]) == 0
    assert entry.id in (shown := capsys.readouterr().out) and "acme" in shown and key not in shown
    assert main(["keys", "--revoke", entry.id, *where]) == 0
    assert ApiKeys(tmp_path / "keys.json").find(key) is None
    assert main(["keys", "--revoke", entry.id, *where]) != 0
    assert "headrace keys" in capsys.readouterr().err
