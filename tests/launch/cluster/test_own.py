"""examples/own: one's own checkpoint, image tasks, reward and client in one run on two hosts in network namespaces."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.images import base, packages
from headrace.vmhost.qemu import probe
from tests.launch.cluster.test_hosts import hosts, left
from tests.launch.cluster.test_hosts import pytestmark as needed
from tests.support.hosts import CACHE, environment
from tests.support.paths import ROOT

__all__ = ["hosts"]
pytestmark = [*needed, pytest.mark.timeout(1800)]


def test_it_trains_serves_balances_and_is_exported(hosts: list[str], tmp_path: Path) -> None:
    if why := unavailable():
        pytest.skip(f"no containers here: {why}")
    base.ensure(environment())
    busybox = tmp_path / "busybox"
    busybox.write_bytes(probe._busybox(packages.folder(Path(CACHE))))
    words = [str(ROOT / "examples/own/accept.py"), str(tmp_path), *hosts]
    words += ["--key", str(tmp_path / "key"), "--busybox", str(busybox)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-20000:]}"
    told = json.loads(done.stdout)
    assert told["client"]["turns"] == 2 and told["client"]["tokens"] > 0
    assert told["audit"]["balanced"] and told["audit"]["trained"] == 6, told["audit"]
    assert told["hosts"][0].endswith(": running") and not any("started again" in line for line in told["hosts"])
    assert "no process of the run is left on 2 hosts" in told["stopped"] and left(tmp_path) == []
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert "<|im_start|>" in tokenizer.chat_template
