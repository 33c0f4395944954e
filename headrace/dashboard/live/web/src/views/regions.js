// Regions by versions: which node holds and which replica serves each of the newest versions, and since when.
import { clock, html, number, put } from "../html.js";
import { state } from "../state.js";
import { asked, failed, panel } from "./panel.js";

const COLUMNS = 8;

export const regions = panel(asked("regions"), (view, found, fault) => {
  const last = Math.max(found.newest, ...found.nodes.map((n) => n.version), ...found.replicas.map((r) => r.version));
  const versions = Array.from({ length: Math.min(COLUMNS, last + 1) }, (_, i) => last - i).reverse(), oldest = versions[0] ?? 0;
  const cells = (of) => versions.map((v) => html`<td class="n">${of.version === v || (v === oldest && of.version < v) ? html`<span class="chip ${v === last ? "passed" : "open"}">${of.version}</span>` : ""}</td>`);
  const row = (of, name, took, live) => html`<tr><td>${of.region || "(unknown)"}</td><td>${of.node}</td><td>${name}${live ? "" : html` <span class="soft">gone</span>`}</td>${cells(of)}<td class="n">${last - of.version}</td><td class="n">${clock(of.since)}</td><td class="n">${took}</td></tr>`;
  put(view, html`${failed(fault)}${last < 0 ? html`<p class="empty">No node has staged a version yet.</p>` : html`<table class="rows"><thead><tr><th>region</th><th>node</th><th>replica</th>${versions.map((v) => html`<th class="n">${v}</th>`)}<th class="n">behind</th><th class="n">since</th><th class="n">took</th></tr></thead><tbody>
  ${found.nodes.map((n) => row(n, html`<span class="soft">holds the file</span>`, `${number(n.stage_s)} s`, true))}
  ${found.replicas.map((r) => row(r, r.replica, `${number(r.pause_ms, 1)} ms`, r.alive))}</tbody></table>`}
  <p class="note">Columns are versions; the newest is ${last}. "took" is the staging of a file and the pause of a swap. <code>headrace status --regions ${state.settings.run}</code></p>`);
});
