// Attempts with a score, newest first; the filter matches task, verdict, group and lane.
import { clock, html, number, put, span } from "../html.js";
import { state } from "../state.js";

let filter = "";
export function trajectories(view) {
  if (!view.querySelector("#filter")) {
    view.innerHTML = `<input id="filter" type="search" placeholder="Filter: passed, failed, cheating, a task, a group, a lane" aria-label="Filter"><div id="list"></div>`;
    view.querySelector("#filter").value = filter;
    view.querySelector("#filter").oninput = (event) => { filter = event.target.value; trajectories(view); };
  }
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const all = [...state.scores.values()].filter((s) => { const text = `${s.verdict} ${s.group} ${s.lane} ${s.family} ${s.task.suite} ${s.task.task} ${(s.suspicions ?? []).join(" ")}`.toLowerCase(); return words.every((w) => text.includes(w)); }).sort((a, b) => b.trajectory_seq - a.trajectory_seq);
  put(view.querySelector("#list"), html`<table class="rows"><thead><tr><th>verdict</th><th>task</th><th>family</th><th>lane</th><th>group</th><th class="n">reward</th><th class="n">turns</th><th class="n">calls</th><th class="n">tokens</th><th class="n">judged</th></tr></thead><tbody>
  ${all.slice(0, 300).map((s) => html`<tr><td><a class="chip ${s.verdict}" href="#/t/${s.trajectory_seq}">${s.verdict.replace("_", " ")}</a></td><td><a href="#/t/${s.trajectory_seq}">${s.task.suite} <span class="soft">${s.task.task}</span></a></td><td>${s.family}</td><td>${s.lane}</td><td class="mono">${s.group}·${s.slot}${s.attempt ? html`<span class="soft">·${s.attempt}</span>` : ""}</td><td class="n">${number(s.reward)}</td><td class="n">${s.turns ?? 0}</td><td class="n">${s.calls ?? 0}</td><td class="n">${s.sampled_tokens ?? 0}</td><td class="n">${span((s.wall_ms ?? 0) / 1000)}</td></tr>`)}
  </tbody></table>${all.length ? "" : html`<p class="empty">${state.scores.size ? "No attempt matches." : "No attempt was scored yet."}</p>`}${all.length > 300 ? html`<p class="note">The newest 300 of ${all.length}.</p>` : ""}`);
}
