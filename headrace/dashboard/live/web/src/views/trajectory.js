// One attempt: turns with their calls side by side, what each returned, the diff, the reward's parts, how to repeat it.
import { count, html, number, percent, put, span } from "../html.js";
import { fetchJson } from "../main.js";

const shade = (logprob) => Math.min(1, Math.max(0, -logprob / 4)).toFixed(2);
const gapOf = (gaps, i) => (!gaps ? null : gaps.length ? gaps[i] ?? null : 0);
const tokens = (list, gaps) => html`<p class="tokens">${list.map(([text, logprob], i) => {
  const gap = gapOf(gaps, i);
  return html`<span class="${gap ? "gap" : ""}" style="--p:${shade(logprob)}" title="log-probability ${number(logprob, 3)}${gap === null ? "" : `, trainer minus sampler ${gap ? gap.toExponential(2) : 0}`}">${text}</span>`;
})}</p>`;
const largestGap = (gaps) => (gaps ? html`<span class="soft">largest gap to the trainer ${gaps.length ? number(Math.max(...gaps.map(Math.abs)), 5) : 0}</span>` : "");
const argumentsOf = (call) => Object.entries(call.arguments ?? {}).map(([name, value]) => html`<div class="argument"><span>${name}</span><pre>${value}</pre></div>`);

function call(c, results) {
  const result = results.find((r) => r.call_id === c.id);
  return html`<div class="call ${c.error || (result && !result.ok) ? "bad" : ""}"><header><b>${c.name || "unreadable call"}</b>${result ? html`<span>${span((result.wall_ms ?? 0) / 1000)}</span>` : ""}</header>${argumentsOf(c)}
    ${c.error ? html`<pre class="bad">${c.error}</pre>` : ""}${result ? html`<pre class="result">${result.output}${result.truncated ? "\n… truncated" : ""}</pre>` : c.error ? "" : html`<p class="soft">no result on record</p>`}</div>`;
}

const diffLine = (line) => html`<span class="${line.startsWith("+") ? "plus" : line.startsWith("-") ? "minus" : line.startsWith("@") ? "at" : ""}">${line}\n</span>`;

const rubric = (r) => html`<h3>${r.rubric} <span class="soft">${number(r.value, 3)}, judged by ${r.model}</span></h3>
  <table class="rows"><thead><tr><th>criterion</th><th class="n">weight</th><th class="n">met</th><th>the judge's reason</th></tr></thead><tbody>${r.criteria.map((c) => html`<tr><td>${c.id}${c.pitfall ? html` <span class="chip failed">pitfall</span>` : ""}</td><td class="n">${number(c.weight)}</td><td class="n">${percent(c.met)}</td><td class="wide">${c.reason}</td></tr>`)}</tbody></table>`;

// Where the attempt's time went: calls of a turn run at once, so a turn takes its longest; the rest is sampling and waiting for it.
export function spent(t) {
  const slowest = t.turns.map((turn) => turn.results.reduce((most, r) => ((r.wall_ms ?? 0) > (most?.wall_ms ?? 0) ? r : most), null)).filter(Boolean);
  const calls = slowest.reduce((sum, r) => sum + r.wall_ms / 1000, 0), longest = slowest.sort((a, b) => b.wall_ms - a.wall_ms)[0];
  if (!t.wall_s || !longest) return "";
  const named = t.turns.flatMap((turn) => turn.calls).find((c) => c.id === longest.call_id)?.name ?? "a call";
  return `Of ${span(t.wall_s)}, ${span(calls)} went to calls (the longest: ${named}, ${span(longest.wall_ms / 1000)}) and ${span(Math.max(0, t.wall_s - calls))} to sampling and waiting.`;
}

function page(t) {
  const s = t.score;
  return html`<article class="trajectory"><header><a class="soft" href="#/trajectories">Trajectories</a><h2>${t.task.suite} <span class="soft">${t.task.task}</span></h2>
    <p><span class="chip ${s?.verdict ?? "open"}">${s ? s.verdict.replace("_", " ") : "no score"}</span> <span class="mono">${t.id}</span> · ${t.lane} · version ${t.versions.length ? t.versions.join(", ") : "–"} · ${t.turns.length} turns · ${count(t.sampled_tokens)} tokens · ${span(t.wall_s)} · ${t.outcome.replace("_", " ")} · ${t.backend}, ${t.isolation}</p></header>
  <div class="columns"><section tabindex="0"><h2>Reward ${s ? number(s.reward) : ""}</h2>${s ? html`
    <table><tbody><tr><td>verdict</td><td>${s.verdict}${s.again ? html` <span class="soft">judged again: ${s.again}</span>` : ""}</td></tr>
    ${t.parts.map(([name, value]) => html`<tr><td>${name}</td><td>${value}</td></tr>`)}
    ${s.reason ? html`<tr><td>reason</td><td>${s.reason}</td></tr>` : ""}${(s.suspicions ?? []).map((x) => html`<tr><td>suspicion</td><td class="bad">${x}</td></tr>`)}</tbody></table>
    ${s.rubric ? rubric(s.rubric) : ""}
    <ul class="tests">${(s.tests ?? []).map((x) => html`<li class="${x.outcome}"><b>${x.outcome}</b> <span class="mono">${x.name}</span>${x.message ? html`<pre>${x.message}</pre>` : ""}</li>`)}</ul>` : html`<p class="empty">No judge has scored it.</p>`}</section>
    <section tabindex="0"><h2>Repeat it</h2><pre class="command">${t.command}</pre><button data-copy="${t.command}">Copy</button>
    <p class="note">Runs the recorded calls again in a fresh sandbox of this machine and compares their results.</p>
    ${t.step === null ? "" : html`<p class="note">Trained in step ${t.step}${t.mismatch ? html`; its engine ${t.mismatch.engine}: k1 ${number(t.mismatch.k1, 5)}, k3 ${number(t.mismatch.k3, 5)}, largest gap ${number(t.mismatch.max_abs_dlp, 5)} over ${t.mismatch.tokens} re-scored tokens` : ""}.</p>`}</section></div>
  ${t.prompt ? html`<section><h2>Prompt</h2><pre class="prompt">${t.prompt}</pre></section>` : ""}
  <section><h2>Turns</h2>${spent(t) ? html`<p class="words">${spent(t)}</p>` : ""}${t.turns.map((turn, i) => html`${i && turn.segment !== t.turns[i - 1].segment ? html`<p class="boundary">context summarised: a new segment begins</p>` : ""}
    <div class="turn ${turn.kind}"><header><b>${turn.kind === "summary" ? "summary" : `turn ${turn.index + 1}`}</b><span>${turn.sampled} tokens, ${turn.stop}</span>${turn.versions.length > 1 ? html`<span class="chip">versions ${turn.versions.join(" → ")}</span>` : ""}<span class="soft">mean log-probability ${number(turn.mean_logprob, 3)}</span>${largestGap(turn.gaps)}</header>
    ${turn.tokens.length ? tokens(turn.tokens, turn.gaps) : ""}
    ${turn.calls.length ? html`<div class="calls" style="--n:${Math.min(turn.calls.length, 3)}">${turn.calls.map((c) => call(c, turn.results))}</div>` : ""}</div>`)}</section>
  <section><h2>Diff</h2>${t.diff.length ? t.diff.map((file) => html`<div class="diff"><header class="mono">${file.path}</header><pre>${file.lines.map(diffLine)}</pre></div>`) : html`<p class="empty">No file was changed.</p>`}${t.touched.length ? html`<p class="note">Changed outside the allowed paths, ignored by the tests: ${t.touched.join(", ")}</p>` : ""}</section></article>`;
}

export function trajectory(view, seq) {
  view.onclick = async (event) => {
    const text = event.target.dataset?.copy;
    if (!text) return;
    await navigator.clipboard.writeText(text).then(() => { event.target.textContent = "Copied"; }, () => { event.target.textContent = "Select the text to copy it"; });
  };
  if (view.dataset.seq === seq && view._text !== undefined) return undefined;
  view.dataset.seq = seq;
  put(view, html`<p class="empty">Loading attempt ${seq} …</p>`);
  fetchJson(`api/trajectory/${encodeURIComponent(seq)}`).then((t) => { if (view.dataset.seq === seq) put(view, page(t)); }, (error) => { if (view.dataset.seq === seq) put(view, html`<p class="empty bad">${error.message}</p>`); });
  return () => { delete view.dataset.seq; };
}
