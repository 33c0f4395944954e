"""A whole run whose rollout actors are in regions: `python -m benchmarks.regions`, small."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NO_NAMESPACES = bool(os.geteuid()) or shutil.which("ip") is None or not os.path.exists("/dev/net/tun")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(NO_NAMESPACES, reason="network namespaces need root, iproute2 and /dev/net/tun")
def test_regions_behind_their_own_brokers_sample_what_is_trained(tmp_path: Path) -> None:
    """Two regions, one of which is cut off for a while: the audit balances, and each has sampled every version."""
    words = (sys.executable, "-m", "benchmarks.regions", "--regions", "2", "--steps", "4", "--cut-s", "8")
    done = subprocess.run((*words, "--folder", str(tmp_path)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["audit_balanced"] and figures["steps"] == 4 and figures["duplicates"] == 0
    assert figures["issued"] == figures["trained"] + sum(figures["dropped"].values()) > 0
    assert figures["eu_trained_attempts"] > 0 and figures["us_trained_attempts"] > 0
    assert figures["staleness_max"] <= figures["staleness_bound"]
    assert figures["cut_region"] == "us" and 0 < figures["cut_sampled_after_return_s"]
    assert [*figures["versions"]] == ["1", "2"]
    for row in figures["versions"].values():
        for name in ("eu", "us"):
            assert 0 < row[name]["staged_s"] <= min(row[name]["swapped_s"], row[name]["sampled_s"])
