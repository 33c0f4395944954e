"""Harbor itself reads exported folders. `make test-clients` installs it where a Python 3.12 is installed."""

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cli.main import main
from headrace.messages.tasks import SandboxLimits, TestPlan
from headrace.tasks import open_suite
from headrace.tasks.exporting.harbor import folder_of
from tests.support.paths import ROOT

HARBOR = ROOT / ".cache" / "clients" / "harbor" / "bin" / "python"
pytestmark = [pytest.mark.clients, pytest.mark.skipif(not HARBOR.exists(), reason="Harbor needs Python 3.12")]
READ = """
import json, sys
from pathlib import Path
from harbor.models.task.config import TaskConfig
out = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    text = (folder / "task.toml").read_text()
    config = TaskConfig.model_validate_toml(text)
    out[folder.name] = json.loads(config.model_dump_json())
print(json.dumps(out))
"""


def read(folder: Path) -> dict[str, Any]:
    """Harbor's own reading of every task.toml below a folder."""
    done = subprocess.run([HARBOR, "-I", "-c", READ, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


def test_harbor_reads_the_exported_tasks(tmp_path: Path) -> None:
    assert main(["tasks", "export", "generated/heldout", str(tmp_path), "--tasks", "2"]) == 0
    suite = open_suite("generated/heldout")
    id = suite.ids()[2]
    limits = SandboxLimits(vcpus=2, memory_mib=2048, disk_mib=10240, time_s=900.0)
    task = msgspec.structs.replace(
        suite.task(id), image="docker.io/org/app:1", repository="/testbed", network=("pypi.org:443",), limits=limits
    )
    oracle = msgspec.structs.replace(suite.oracle(id), tests=TestPlan(kind="command", argv=("true",), timeout_s=30.0))
    for path, data in folder_of(task, oracle).files.items():
        (tmp_path / "limited" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "limited" / path).write_bytes(data)
    configs = read(tmp_path)
    assert sorted(configs) == sorted([*suite.ids()[:2], "limited"])
    for config in configs.values():
        assert config["schema_version"] == "1.4" and config["task"]["name"].startswith("headrace/")
    plain, limited = configs[suite.ids()[0]], configs["limited"]
    assert plain["environment"]["network_mode"] == "no-network"
    environment = limited["environment"]
    sizes = [environment[key] for key in ("cpus", "memory_mb", "storage_mb", "workdir")]
    assert sizes == [2, 2048, 10240, "/testbed"]
    assert (environment["network_mode"], environment["allowed_hosts"]) == ("allowlist", ["pypi.org"])
    assert (limited["agent"]["timeout_sec"], limited["verifier"]["timeout_sec"]) == (900.0, 120.0)
