"""The end of a run: its books, its report, and the short table."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.dashboard.watch import Watch
    from headrace.launch.processes import Run

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children that were reaped, in seconds; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(value) for value in fields[11:15]) / _TICK


async def meter(run: "Run", watch: "Watch") -> None:
    """Keep each process's CPU seconds in `watch.cpu`; a restarted process adds to its predecessor's."""
    seen: dict[int, tuple[str, float]] = {}
    while True:
        for child in run.children:
            if child.process is not None and child.process.returncode is None:
                seconds = cpu_seconds(child.process.pid)
                if seconds:
                    seen[child.process.pid] = (child.name, seconds)
        totals: dict[str, float] = {}
        for name, seconds in seen.values():
            totals[name] = totals.get(name, 0.0) + seconds
        watch.cpu = totals
        await asyncio.sleep(1.0)


async def close_books(run: "Run", bus: "Bus", watch: "Watch", *, started: float, ready: float, shutdown: float) -> int:
    """Audit, report.json, report.html, and the table; 1 when the audit does not balance."""
    from headrace.dashboard import figures, page
    from headrace.replay.audit import audit

    audited = await audit(bus, run.folder.id)
    ledger: dict[str, Any] = msgspec.to_builtins(audited)
    collected = await figures.collect(bus, run.folder.id)
    await bus.close()
    report = figures.report(run.config, watch, collected, ledger, started=started, ready=ready, shutdown=shutdown) | {
        "restarts": run.restarts,
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    (run.folder.path / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (run.folder.path / "report.html").write_text(page.render(report, watch, collected, run.folder.path))
    print_table(report, run.folder.path)
    return 0 if audited.balanced else 1


def print_table(report: dict[str, Any], folder: Path) -> None:
    """What a newcomer reads first."""
    from headrace.launch.output import say

    def show(value: Any) -> str:
        return "not measured" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    unseen = report["unseen_templates"]
    rows = [
        ("held-out tasks, temperature 1", f"{show(report['heldout_before'])} -> {show(report['heldout_after_t1'])}"),
        ("held-out tasks, greedy, after", show(report["heldout_after_greedy"])),
        ("templates never trained on", f"{show(unseen['before'])} -> {show(unseen['after_t1'])}"),
        ("steps, episodes, VM clones", f"{report['steps']}, {report['episodes']}, {report['vm_clones']}"),
        ("staleness, largest / bound", f"{report['staleness_max']} / {report['ledger']['staleness_bound']}"),
        ("sampler against trainer, largest |dlp|", str(report["max_abs_dlp"])),
        ("audit", "balances" if report["ledger"]["balanced"] else "DOES NOT BALANCE"),
        ("wall", f"{report['wall_s']:.0f} s"),
    ]
    width = max(len(name) for name, _ in rows)
    say("")
    for name, value in rows:
        say(f"  {name:<{width}}  {value}")
    say(f"\n{folder}/report.html has the curves and three transcripts; headrace audit {folder.name} proves the books.")
