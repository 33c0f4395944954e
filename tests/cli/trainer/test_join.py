"""`headrace trainer join` before it reaches a trainer."""

from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.trainer import master_of, node_of
from headrace.launch.runs import RunError

TWO_NODES = tuple(
    word for key in ("mesh.shard=2", "node_ranks=1", "rendezvous=127.0.0.1:1") for word in ("--set", f"trainer.{key}")
)


def test_number_and_address_come_from_torchrun_or_slurm() -> None:
    assert node_of({"SLURM_NODEID": "2", "NODE_RANK": "1"}) == 1
    assert node_of({"SLURM_NODEID": "2", "NODE_RANK": ""}) == 2
    assert node_of({}) is None
    with pytest.raises(RunError, match="NODE_RANK: expected a number, got 'one'"):
        node_of({"NODE_RANK": "one"})
    assert master_of({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}) == "node0:29500"
    assert master_of({"MASTER_ADDR": "node0"}) == ""
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert master_of(torchrun) == "", "this is the store of its agent"


def test_one_process_of_a_machine_joins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a second one that torchrun started asked node 0 without end."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    (tmp_path / "run.toml").write_text("")
    assert main(["trainer", "join", str(tmp_path / "run.toml"), "--node", "1", *TWO_NODES]) == 2
    assert "torchrun --nproc-per-node 1" in capsys.readouterr().err
