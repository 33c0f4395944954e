"""README's figures are those of benchmarks/results, and each row has the label that makes its figure honest.

A rerun that writes new results makes these tests fail until README follows.
"""

import json
from typing import Any

import pytest

from tests.support.cheating import CHEATS
from tests.support.honest import HONEST
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text()


def results(name: str) -> Any:
    """A file of benchmarks/results, decoded."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def row(marker: str) -> str:
    """The one row of README's tables that contains a text."""
    rows = [line for line in README.splitlines() if line.startswith("|") and marker in line]
    assert len(rows) == 1, f"{len(rows)} rows of README contain {marker!r}, expected one"
    return rows[0]


def check(marker: str, *texts: str) -> None:
    """Every text stands in the row."""
    line = row(marker)
    missing = [text for text in texts if text not in line]
    assert not missing, f"README lacks {missing}, which benchmarks/results has, in: {line}"


def test_the_asynchronous_row_names_its_backend_its_waits_and_the_ratio_in_microvms() -> None:
    cell = results("async_vs_sync")
    assert (cell["backend"], cell["isolated"], cell["vms_backend"]) == ("process", False, "qemu")
    missed = [entry for entry in cell["targets"].values() if not entry["met"]]
    seeds = {"1": "one seed", "1,2": "two seeds", "1,2,3": "three seeds"}[cell["vms_sleeps_seeds"]]
    sides = ("vms_sleeps_sync", "vms_sleeps_async2")
    loads = [load for side in sides for load in cell[f"{side}_load_by_seed"]]
    busy = " and ".join(f"{cell[f'{side}_cpu_s_per_s']:.2f}" for side in sides)
    sleeps = f"{seeds}, load {min(loads):.1f} to {max(loads):.1f}, {busy} CPU-seconds a second"
    sleeps += (
        f", {cell['vms_sleeps_steps']} steps; the reward differs by {-cell['vms_sleeps_reward_lost']:+.2f} at equal "
    )
    sleeps += f"samples, with a standard error of {cell['vms_sleeps_reward_lost_error']:.2f}, and by "
    equal_time = (cell[f"{side}_reward_at_equal_wall_mean"] for side in reversed(sides))
    sleeps += f"{next(equal_time) - next(equal_time):+.2f} at equal time; "
    sleeps += f"{cell['vms_sleeps_async2_over_sync_attempts_ratio']:.1f}x trained attempts per second"
    check(
        "python -m benchmarks.async_vs_sync",
        "waits injected into tool calls",
        f"{cell['waits_async2_over_sync_ratio']:.1f}x trained tokens per second at staleness 2 in the process backend, "
        f"not isolated; in microVMs {cell['vms_sleeps_async2_over_sync_ratio']:.1f}x if `run_tests` sleeps as recorded "
        f"shell calls did ({sleeps}), and {cell['vms_waits_async2_over_sync_ratio']:.2f}x if waits are short",
        f"without waits {cell['plain_async2_over_sync_ratio']:.2f}x",
        *(f"{entry['value']}" for entry in missed),
        *(f"{entry['target']}" for entry in missed),
        f"{['No', 'One', 'Two', 'Three', 'Four', 'Five'][len(missed)]} targets are missed",
    )


def test_the_lag_row_names_the_arms_that_collapse_and_those_that_hold() -> None:
    study = results("lag_study")
    assert (study["backend"], study["isolated"]) == ("process", False)
    runs, held = study["arms_runs"], study["held_runs"]
    assert held["truncated"] == 0 < runs["truncated"]
    assert all(held[arm] == runs[arm] for arm in ("clipped", "guarded"))
    assert set(runs.values()) == {1, 2}
    check(
        "python -m benchmarks.lag_study",
        "truncated importance sampling collapses",
        "process backend, not isolated",
        "one or two seeds per arm",
    )


def test_the_chaos_row_shows_every_part_and_the_slowest_kind() -> None:
    chaos = results("chaos")
    kills, stops, restarts = chaos["kills"], chaos["stops_and_cuts"], chaos["restarts"]
    recovery = kills["recovery"]
    slots = [part["audit"] for part in (kills, stops)]
    assert all(audit["balanced"] and not audit["duplicates"] for audit in slots) and not restarts["unbalanced"]
    issued = sum(audit["issued"] for audit in slots) + restarts["issued_slots"]
    trained = sum(audit["trained"] for audit in slots) + restarts["trained_slots"]
    kinds = {"kill": "process", "machine_kill": "machine", "broker_kill": "broker"}
    check(
        "`make chaos`",
        f"{kills['kills']} kills in microVMs, {stops['kills']} stops and cut connections, {restarts['kills']} kills",
        f"{trained:,} of {issued:,} slots",
        f"{recovery['all']['p50_s']:.1f} s p50 and {recovery['all']['p99_s']:.1f} s p99",
        f"the slowest kind is a killed {kinds[recovery['slowest_kind']]}, {recovery['slowest_s']:.1f} s",
        f"{recovery['at_work_again']['p50_s']:.1f} s p50 and {recovery['at_work_again']['p99_s']:.1f} s p99, waits",
        f"within {restarts['gone_max_s']:.2f} s",
    )


def test_the_demos_rows_are_those_of_its_last_run() -> None:
    demo = results("demo")
    production, families = demo["production"], demo["families"]["heldout_after_t1"]
    assert demo["ledger"]["balanced"]
    assert f"`make demo`, seed {demo['seed']}, {demo['conditions']['date']}," in README
    assert f"(load {demo['conditions']['load']:.1f}; benchmarks/results/demo.json)" in README
    check(
        f"{demo['heldout_tasks']} held-out tasks, temperature 1",
        f"{demo['heldout_before']:.2f} before, {demo['heldout_after_t1']:.2f} after {demo['steps']} steps",
    )
    check("the same, greedy", f"{demo['heldout_after_greedy']:.2f} after")
    unseen = demo["unseen_templates"]
    check(f"{unseen['tasks']} tasks of templates", f"{unseen['before']:.2f} before, {unseen['after_t1']:.2f} after")
    check(
        "by length of the function",
        *("{} of {}".format(*families[length]) for length in ("multi_line", "one_line")),
    )
    check(
        "VM clones",
        f"{demo['episodes']:,} episodes in {demo['vm_clones']:,} VM clones",
        f"{demo['wall_s']:,.0f} s, {sum(demo['cpu_s'].values()):,.0f} CPU-seconds",
    )
    check(
        "staleness and mismatch",
        f"staleness {demo['staleness_max']} of {demo['ledger']['staleness_bound']}",
        f"{demo['max_abs_dlp']} over {demo['rescored_tokens']:,} re-scored of {demo['tokens_sampled']:,} tokens",
    )
    check(
        "product lane",
        f"{production['requests']} requests: {production['p50_s']:.1f} s median, {production['p99_s']:.0f} s p99",
        f"slowest of {production['reclaims']} reclaims by the scavenger {production['reclaim_max_s']:.2f} s",
    )


def test_the_row_of_four_regions_names_both_shares_of_the_link() -> None:
    fanout = results("fanout")
    check(
        "python -m benchmarks.fanout",
        f"four regions at {fanout['link_mbit']} Mbit/s",
        f"{fanout['delta_wire_bytes'] / 2**20:.0f} MiB delta staged in {fanout['delta_staged_s']:.1f} s",
        f"at {fanout['changed_pct']} % changed weights",
        f"{fanout['delta_fraction_until_staged']:.2f} of the link used until staged, "
        f"{fanout['delta_fraction_of_link']:.2f} until the link is quiet",
        "simulated",
    )


def test_the_proofs_table_has_every_seed() -> None:
    proof = results("proof")
    for index, seed in enumerate(proof["seeds"].split(",")):
        before, after, greedy = (proof[f"heldout_{name}"][index] for name in ("before", "after_t1", "after_greedy"))
        unseen = proof["unseen_templates"][index]
        cells = [seed, f"{before:.3f}", f"{after:.3f}", f"{greedy:.3f}"]
        cells += [f"{unseen[name]:.2f}" for name in ("before", "after_t1", "after_greedy")]
        assert f"| {' | '.join(cells)} |" in README.splitlines(), f"README's table of `make proof` lacks seed {seed}"


def test_the_other_rows_have_the_figures_of_their_files() -> None:
    delta, swap, bus, clone = map(results, ("weight_delta", "swap_pause", "bus", "vm_clone"))
    numerics = results("numerics")["bfloat16"]
    check(
        "python -m benchmarks.weight_delta",
        f"{delta['at_0p94_pct_d8_zstd_ratio']:.0f}x smaller at {delta['at_0p94_pct_changed_pct']:.2f} % changed",
        f"{delta['at_0p94_pct_d10_zstd_ratio']:.0f}x with the codec for thin links",
        f"fireworks-delta-compression {delta['at_0p94_pct_fireworks_arc_v3_ratio']:.0f}x",
    )
    check(
        "python -m benchmarks.swap_pause",
        f"{swap['swap_step_p50_ms']:.2f} ms (p50) instead of {swap['calm_step_p50_ms']:.2f}",
    )
    assert (numerics["exact_bit_equal_share"], numerics["ordinary_bit_equal_share"]) == (1.0, 0.0)
    decode = [numerics[f"decode_b{batch}_exact_over_ordinary"] for batch in (1, 4, 16, 64)]
    check(
        "python -m benchmarks.numerics",
        f"all bits of {numerics['exact_tokens']:,} sampled tokens equal in bfloat16, ordinary mode: none",
        f"{min(decode):.2f} to {max(decode):.2f} times",
    )
    check(
        "python -m benchmarks.bus",
        f"small call {bus['ray_call_over_ours_ratio']:.1f}x as fast",
        f"{bus['shared_flow_over_ray_ratio']:.1f}x through shared memory",
        f"{bus['broker_flow_over_ray_ratio']:.1f}x through the broker",
    )
    check(
        "python -m benchmarks.vm_clone",
        f"{clone['boot_over_clone_wall_ratio']:.0f}x less wall time",
        f"{clone['boot_over_clone_cpu_ratio']:.0f}x less CPU",
        f"{clone['warm_acquire_p50_ms']:.1f} ms to acquire a warm clone; TCG",
    )
    check("tests/laws/test_cheats.py", f"{len(CHEATS)} ways to cheat and {len(HONEST)} honest attempts, five shapes")


AGED = {
    "`make chaos`": "chaos",
    "`headrace replay RUN": "replay",
    "benchmarks.weight_delta`": "weight_delta",
    "benchmarks.fanout`": "fanout",
    "benchmarks.swap_pause`": "swap_pause",
    "benchmarks.numerics`": "numerics",
    "benchmarks.demo_sglang": "demo_sglang",
    "benchmarks.async_vs_sync`": "async_vs_sync",
    "benchmarks.bus`": "bus",
    "benchmarks.lag_study`": "lag_study",
    "`make proof-compaction": "proof_compaction_process",
    "benchmarks.vm_clone`": "vm_clone",
}
"""The commands of the last table, and the files that hold what they measured."""


@pytest.mark.parametrize("command", AGED)
def test_every_row_with_a_command_names_the_age_of_its_figures(command: str) -> None:
    found = results(AGED[command])
    made = found["conditions"] if "conditions" in found else found["bfloat16"]["conditions"]
    rows = [line for line in README.splitlines() if line.startswith("|") and command in line.rpartition(" | ")[2]]
    assert [line.split(" | ")[-2] for line in rows] == [f"{made['date']}, {made['commit']}"]


def test_every_command_of_the_table_has_an_age() -> None:
    table = README.partition("| measured, commit | command |")[2].partition("\n\n")[0]
    rows = [line.split(" | ")[-2:] for line in table.splitlines()[2:]]
    unaged = [command for age, command in rows if not any(known in command for known in AGED)]
    assert [age for age, _ in rows if age == "at every `make test-all`"] == ["at every `make test-all`"] * len(unaged)
