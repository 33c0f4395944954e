"""The end of a run: its audit, its report, and the table that the terminal shows."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace import process_stat
from headrace.launch.output import complain, say

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.dashboard.report import Moments, RunReport
    from headrace.dashboard.watch import Watch
    from headrace.launch.processes import Run
    from headrace.messages.tasks import TaskRef


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its reaped children, in seconds; 0 when there is no such process."""
    stat = process_stat.read(pid)
    return 0.0 if stat is None else stat.cpu_s + stat.reaped_cpu_s


async def meter(run: "Run", watch: "Watch") -> None:
    """Keep each process's CPU seconds in `watch.cpu`; a restarted process adds to the earlier seconds."""
    seconds_by_pid: dict[int, tuple[str, float]] = {}
    while True:
        for child in run.children:
            if child.process is not None and child.process.returncode is None:
                seconds = cpu_seconds(child.process.pid)
                if seconds:
                    seconds_by_pid[child.process.pid] = (child.name, seconds)
        totals: dict[str, float] = {}
        for name, seconds in seconds_by_pid.values():
            totals[name] = totals.get(name, 0.0) + seconds
        watch.cpu = totals
        await asyncio.sleep(1.0)


async def write_report(run: "Run", bus: "Bus", watch: "Watch", moments: "Moments") -> int:
    """Audit the run, write report.json and report.html, and print the table; 1 when the audit does not balance."""
    from headrace.dashboard import page, records, report
    from headrace.replay.audit import prove
    from headrace.tasks import open_suite
    from headrace.vmhost.backend import Capabilities
    from headrace.vmhost.backends.registry import capabilities
    from headrace.vmhost.errors import VmhostError

    def prompts(ref: "TaskRef") -> str:
        return open_suite(ref.suite, run.config.tasks.dir).task(ref.task).prompt

    ledger, faults = await prove(bus, run.folder.id)
    for fault in faults:
        complain(fault)
    stored = await records.collect(bus, run.folder.id, watch.asked)
    declared = []
    for name in stored.backends:
        try:
            declared.append(capabilities(name))
        except VmhostError:  # a record names a backend that is unknown here: nothing is known of it
            declared.append(Capabilities())
    backends = report.Backends(
        isolated=bool(declared) and all(each.isolated for each in declared),
        machines=any(each.kernel_private for each in declared),
    )
    built = report.build(run.config, watch, stored, ledger, moments, run.restarts, backends)
    text = msgspec.json.format(msgspec.json.encode(built), indent=2)
    (run.folder.path / "report.json").write_bytes(text + b"\n")
    (run.folder.path / "report.html").write_text(page.render(built, watch, stored, prompts))
    print_table(built, run.folder.path)
    return 0 if ledger.balanced else 1


def print_table(report: "RunReport", folder: Path) -> None:
    """Print the main figures."""

    def show(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.2f}"

    unseen = report.unseen_templates
    rows = [
        ("held-out tasks, temperature 1", f"{show(report.heldout_before)} -> {show(report.heldout_after_t1)}"),
        ("held-out tasks, greedy", f"{show(report.heldout_before_greedy)} -> {show(report.heldout_after_greedy)}"),
        ("templates without training", f"{show(unseen.before)} -> {show(unseen.after_t1)}"),
        ("the same, greedy", f"{show(unseen.before_greedy)} -> {show(unseen.after_greedy)}"),
        ("steps, episodes, VM clones", f"{report.steps}, {report.episodes}, {report.vm_clones}"),
        ("staleness, largest / bound", f"{report.staleness_max} / {report.ledger.staleness_bound}"),
        ("sampler against trainer, largest |dlp|", str(report.max_abs_dlp)),
        ("audit", "balances" if report.ledger.balanced else "DOES NOT BALANCE"),
        ("wall", f"{report.wall_s:.0f} s"),
    ]
    width = max(len(name) for name, _ in rows)
    say("")
    for name, value in rows:
        say(f"  {name:<{width}}  {value}")
    say("")
    for name, command in (
        ("curves, transcripts, what limited it", f"{folder}/report.html"),
        ("the ledger, proved again", f"headrace audit {folder}"),
        ("a step again, compared bit by bit", f"headrace replay {folder} --step {max(report.steps - 1, 0)}"),
        ("the policy as a Hugging Face folder", f"headrace export {folder} policy"),
        ("more steps of the same run", f"headrace up CONFIG --set run.id={folder.name} --set curriculum.steps=N"),
    ):
        say(f"  {name:<{width}}  {command}")
