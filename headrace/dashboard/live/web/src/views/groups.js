// Groups in the order in which they were issued: a cell per slot. All fail and all pass teach nothing.
import { html, percent, put } from "../html.js";
import { outcome, state } from "../state.js";

let lane = "train";
export function groups(view) {
  view.onclick = (event) => { const chosen = event.target.dataset?.lane; if (chosen) { lane = chosen; groups(view); } };
  const all = [...state.groups.values()].filter((g) => g.lane === lane && g.slots.size).sort((a, b) => b.time - a.time || b.name.localeCompare(a.name));
  const kinds = { fail: 0, mixed: 0, pass: 0 }, ended = all.filter((g) => g.fate !== "open" && outcome(g) !== "none");
  for (const g of ended) kinds[outcome(g)]++;
  const share = (n) => (ended.length ? n / ended.length : 0);
  put(view, html`<div class="switch">${["train", "eval"].map((name) => html`<button data-lane="${name}" class="${lane === name ? "here" : ""}">${name}</button>`)}</div>
  <div class="stack"><i class="fail" style="flex:${kinds.fail || 0.001}"></i><i class="mixed" style="flex:${kinds.mixed || 0.001}"></i><i class="pass" style="flex:${kinds.pass || 0.001}"></i></div>
  <p class="legend"><span class="fail">all fail ${percent(share(kinds.fail))}</span><span class="mixed">mixed ${percent(share(kinds.mixed))}: these have an advantage</span><span class="pass">all pass ${percent(share(kinds.pass))}</span><span>${ended.length} groups</span></p>
  <table class="groups"><thead><tr><th>group</th><th>task</th><th>slots</th><th>fate</th><th class="n">step</th></tr></thead><tbody>
  ${all.slice(0, 250).map((g) => html`<tr><td class="mono">${g.name}</td><td>${g.task?.suite} <span class="soft">${g.task?.task}</span></td>
    <td><span class="slots">${[...g.slots.values()].sort((a, b) => a.slot - b.slot).map((s) => s.score
      ? html`<a class="slot ${s.score.verdict}" href="#/t/${s.score.trajectory_seq}" title="slot ${s.slot}: ${s.score.verdict}, reward ${s.score.reward.toFixed(2)}, ${s.score.turns ?? 0} turns"></a>`
      : html`<i class="slot ${s.lost.length ? "lost" : "open"}" title="slot ${s.slot}: ${s.lost.map((l) => l.reason).join(", ") || "in progress"}"></i>`)}</span></td>
    <td class="${g.fate}">${g.fate}${g.why ? html` <span class="soft">${g.why}</span>` : ""}</td><td class="n">${g.step >= 0 ? g.step : ""}</td></tr>`)}
  </tbody></table>${all.length ? "" : html`<p class="empty">No group of this lane yet.</p>`}${all.length > 250 ? html`<p class="note">The newest 250 of ${all.length}.</p>` : ""}`);
}
