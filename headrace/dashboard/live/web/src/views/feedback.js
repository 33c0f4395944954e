// Ratings of users from their record to their end, and the gate: counts alone, no user's session.
import { clock, html, number, percent, put } from "../html.js";
import { state, total } from "../state.js";
import { bars } from "./chart.js";
import { asked, failed, panel } from "./panel.js";

const ENDS = ["trained", "pending", "late", "capped", "opted_out", "unattributed", "superseded", "purged", "discarded"];
const TURNS = [["named", "turns_named"], ["by their history", "turns_by_history"], ["first of a session", "turns_begun"], ["unattributed", "turns_unattributed"]];
const policy = (p) => (p.kind === "pinned" ? `${p.run ? `${p.run} ` : ""}version ${p.version}` : p.kind === "scripted" ? p.name : "the latest");
const arm = (a) => (a.sessions ? html`${a.up} of ${a.sessions} <span class="soft">${percent(a.up / a.sessions)}</span>` : "–");

export const feedback = panel(asked("gate"), (view, { now, verdicts }, fault) => {
  const received = total("feedback", "received"), ends = ENDS.map((name) => [name.replace("_", " "), total("feedback", name) ?? 0]);
  const turns = TURNS.map(([label, name]) => [label, total("gateway", name) ?? 0]);
  const paired = (b) => (b.tasks ? html`+${b.won} −${b.lost} of ${b.tasks}, at least ${number(b.lower, 3)}` : "–");
  put(view, html`${failed(fault)}<div class="columns"><section><h2>Ratings</h2>${received === null ? html`<p class="empty">No feedback actor has sent figures since this page was opened.</p>` : bars([["received", received], ...ends.filter(([, n], i) => n || i < 2)], { mark: "Every rating has one end; pending ones wait for a batch." })}${turns.some(([, n]) => n) ? html`<h2>Clients' turns</h2>${bars(turns, { mark: "How turns came to their session. The earlier turns of an unattributed one belong to no open session." })}` : ""}</section>
  <section><h2>Gate: ${now.stage}</h2><table><tbody><tr><td>candidate</td><td>${now.stage === "idle" ? "none" : policy(now.candidate)}</td></tr><tr><td>promoted</td><td>${policy(now.promoted)}</td></tr><tr><td>share of new sessions</td><td>${percent(now.share)}</td></tr><tr><td>candidate's sessions rated up</td><td>${arm(now.treated)}</td></tr><tr><td>promoted version's</td><td>${arm(now.control)}</td></tr><tr><td>shadow turns</td><td>${now.shadowed}, failed ${now.shadow_failed}</td></tr></tbody></table></section></div>
  <section><h2>Verdicts</h2>${verdicts.length ? html`<table class="rows"><thead><tr><th class="n">when</th><th>stage that begins</th><th>candidate</th><th class="n">share</th><th>same tasks</th><th>candidate up</th><th>promoted up</th><th class="n">harm p</th><th>reason</th></tr></thead><tbody>${[...verdicts].reverse().map(([time, v]) => html`<tr><td class="n">${clock(time)}</td><td>${v.stage}</td><td>${policy(v.candidate)}</td><td class="n">${percent(v.share)}</td><td>${paired(v.benchmark)}</td><td>${arm(v.treated)}</td><td>${arm(v.control)}</td><td class="n">${number(v.harm_p, 3)}</td><td class="wide">${v.reason}</td></tr>`)}</tbody></table>` : html`<p class="empty">No verdict yet.</p>`}</section>
  <p class="note"><code>headrace gate ${state.settings.run}</code>, <code>headrace audit ${state.settings.run}</code></p>`);
});
