"""The gateway's key of a run: for its user alone, and as long as the run."""

import stat
from pathlib import Path

import pytest

from headrace.config import Config, Production, Run
from headrace.gateway.tenants.keys import USUAL, ApiKeys, key_file
from headrace.launch.product.gateway_key import key_of_run, place
from headrace.launch.runs import RunError


def config(folder: Path) -> Config:
    return Config(run=Run(dir=str(folder)), production=Production(tenant="home", training_allowed=True))


def test_a_run_has_a_key_until_it_ends(tmp_path: Path) -> None:
    folder, keys = tmp_path / "r1", ApiKeys(key_file(config(tmp_path)))
    folder.mkdir()
    other = keys.add("acme")
    with key_of_run(config(tmp_path), folder) as path:
        assert path == place(folder) and stat.S_IMODE(path.stat().st_mode) == 0o600
        entry = keys.find(path.read_text())
        assert entry is not None and (entry.tenant, entry.training, entry.scopes) == ("home", True, USUAL)
        made = path.read_text()
    assert not path.exists() and keys.find(made) is None and keys.find(other) is not None


def test_the_key_of_an_interrupted_run_ends_with_its_next_start(tmp_path: Path) -> None:
    folder, keys = tmp_path / "r1", ApiKeys(key_file(config(tmp_path)))
    folder.mkdir()
    place(folder).write_text(left := keys.add("home"))
    with key_of_run(config(tmp_path), folder) as path:
        assert keys.find(left) is None and keys.find(path.read_text()) is not None
        assert len(keys.entries()) == 1


def test_a_file_that_holds_no_keys_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{")
    with pytest.raises(RunError, match=r"keys.json is not a file of API keys.*name another \[production\] keys"):
        with key_of_run(config(tmp_path), tmp_path):
            pass
