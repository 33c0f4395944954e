"""The card of a benchmark: one HTML page without script and without network, of one policy or of two."""

from collections.abc import Iterable

from headrace.bench.report import Comparison, Quantiles, Report
from headrace.dashboard.hypertext import escape
from headrace.dashboard.page import STYLE, number

Rows = Iterable[tuple[str, str]]


def card(reports: list[Report], comparison: Comparison | None) -> str:
    """The page."""
    title = f"Benchmark {reports[-1].suite}"
    parts = [f"<h1>{escape(title)}</h1>"]
    if comparison is not None:
        parts.append(
            f"<h2>{escape(comparison.second)} against {escape(comparison.first)}</h2>{_table(_compared(comparison))}"
        )
    for measured in reports:
        parts.append(
            f"<h2>{escape(measured.policy)}</h2><p>{escape(_origin(measured))}</p>{_table(_figures(measured))}"
        )
        parts.append(f"<h3>Tasks</h3>{_tasks(measured)}")
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    return f"{head}<style>{STYLE}</style>{''.join(parts)}</html>\n"


def _origin(one: Report) -> str:
    version = f", version {one.version}" if one.version >= 0 else ""
    return f"Benchmark {one.id} in run {one.run}{version}: {one.tasks} tasks, {one.trials} trials each."


def _compared(comparison: Comparison) -> Rows:
    gain = comparison.pass_1
    yield "Finding", comparison.finding
    yield (
        "Difference in pass@1 (95 % interval)",
        f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]",
    )
    yield "Smallest difference that is found with probability 0.8", f"{gain.detectable:.3f}"
    yield "Tasks in common; won, lost", f"{gain.tasks}; {gain.won}, {gain.lost}"
    yield "Sampled tokens of an attempt, ratio", number(comparison.sampled_tokens_ratio)
    yield "Calls of an attempt, ratio", number(comparison.calls_ratio)


def _kappa(one: Report, criterion: str) -> str:
    agreement = one.agreements.get(criterion)
    return "not measured" if agreement is None else f"{agreement.kappa:.2f} [{agreement.low:.2f}, {agreement.high:.2f}]"


def _figures(one: Report) -> Rows:
    means = one.means
    yield "pass@1 (95 % interval over tasks)", f"{one.pass_1.mean:.3f} [{one.pass_1.low:.3f}, {one.pass_1.high:.3f}]"
    yield (
        f"pass^{one.trials}: all trials of a task pass",
        f"{one.pass_k.mean:.3f} [{one.pass_k.low:.3f}, {one.pass_k.high:.3f}]",
    )
    yield "Verdicts", ", ".join(f"{name} {count}" for name, count in one.verdicts.items())
    if one.adherence:
        yield (
            "Rubric: criteria met (kappa of the judge, 95 % interval)",
            ", ".join(f"{name} {share:.2f} ({_kappa(one, name)})" for name, share in one.adherence.items()),
        )
    yield "Infrastructure: attempts failed, trials without a verdict", f"{one.infra_failures}, {one.infra_lost}"
    yield "Tokens: sampled in turns, in summaries", f"{number(means.acting_tokens)}, {number(means.summary_tokens)}"
    yield "Tokens sampled in turns: thinking, calls, text", _by_kind(one)
    yield "Tokens: prompts, results of calls", f"{number(means.prompt_tokens)}, {number(means.observed_tokens)}"
    yield "Tokens that self-summarisation dropped", number(means.dropped_tokens)
    yield "Sampled tokens per passed attempt", number(one.sampled_tokens_per_pass)
    yield (
        "Turns, calls, most calls in one turn",
        ", ".join(map(number, (means.turns, means.calls, means.parallel_calls))),
    )
    yield "Calls by tool", ", ".join(f"{name} {number(count)}" for name, count in one.calls_by_tool.items())
    yield "Invalid calls, failed edits", f"{one.invalid_call_share:.1%}, {one.failed_edit_share:.1%}"
    yield "Reads before the first edit", number(means.reads_before_edit)
    yield "Tests run after the last edit", f"{means.tested:.1%}"
    yield "Lint errors fixed, attempts that ask the user", f"{number(means.lint_fixed)}, {means.asked:.1%}"
    yield "Seconds of an attempt: p50, p95", _quantiles(one.attempt_s)
    yield "Seconds to the first edit: p50, p95", _quantiles(one.first_edit_s)
    yield "Milliseconds of a call: p50, p95", _quantiles(one.call_ms)
    yield "Seconds per passed attempt", number(one.attempt_s_per_pass)
    yield "Compared with itself: silent resamples", f"{one.silent:.1%}"
    yield "pass@1 by family", ", ".join(f"{name} {share:.2f}" for name, share in one.families.items())


def _by_kind(measured: Report) -> str:
    means = measured.means
    if means.thinking_tokens is None:
        uncounted = sum(row.tokens.thinking is None for row in measured.rows)
        return f"not counted in {uncounted} of {measured.attempts} attempts"
    return ", ".join(map(number, (means.thinking_tokens, means.call_tokens, means.text_tokens)))


def _quantiles(quantiles: Quantiles) -> str:
    return f"{number(quantiles.p50)}, {number(quantiles.p95)}"


def _tasks(one: Report) -> str:
    rows = ((task, f"{share:.2f}") for task, share in sorted(one.shares.items(), key=lambda item: (item[1], item[0])))
    return _table(rows)


def _table(rows: Rows) -> str:
    cells = "".join(f'<tr><td>{escape(name)}<td class="number">{escape(value)}' for name, value in rows)
    return f"<table>{cells}</table>"
