// One step as a timeline: each attempt of its batch from issue to score, and what the trainer did meanwhile.
import { brief, html, put } from "../html.js";
import { state, stepsInOrder } from "../state.js";

// The trainer's causes in the order in which a step does them.
const CAUSES = { publish: "publishing", checkpoint: "checkpoint", records: "reading records", batch: "waiting for the batch", rescore: "scoring again", busy: "computing", communication: "communication", straggler: "waiting for a process" };
const ROWS = 256;

// The attempts of a step with the times of issue and score; those without both are left out.
export function attemptsOf(step) {
  const out = [];
  for (const name of step.groups) for (const s of state.groups.get(name)?.slots.values() ?? [])
    if (s.issued && s.score) out.push({ name: `${name}·${s.slot}`, from: s.issued, to: s.score.time, verdict: s.score.verdict, seq: s.score.trajectory_seq });
  return out.sort((a, b) => a.from - b.from || a.to - b.to);
}

// Who waited for whom, in one sentence.
export function waits(step, attempts) {
  const seconds = step.efficiency?.seconds ?? {}, wall = step.efficiency?.wall_s ?? step.seconds + step.waited_s, waited = seconds.batch ?? step.waited_s;
  const took = `Step ${step.step} took ${brief(wall)}`, last = [...attempts].sort((a, b) => b.to - a.to);
  if (last.length < 2 || waited < 0.1 * wall) return `${took}; its batch was there.`;
  const [slowest, next] = last;
  return `${took}, and waited ${brief(waited)} of it for its batch. The last attempt was ${slowest.name}: it took ${brief(slowest.to - slowest.from)} and ended ${brief(slowest.to - next.to)} after the one before.`;
}

export function steps(view, argument) {
  const all = stepsInOrder(), step = all.find((s) => s.step === Number(argument)) ?? all.at(-1);
  if (!step) return put(view, html`<p class="empty">No step yet.</p>`);
  const attempts = attemptsOf(step), wall = step.efficiency?.wall_s ?? step.seconds + step.waited_s;
  const begin = Math.min(step.time - wall, ...attempts.map((a) => a.from)), length = Math.max(1e-6, step.time - begin);
  const at = (from, to) => `left:${((100 * (from - begin)) / length).toFixed(2)}%;width:${((100 * Math.max(0, to - from)) / length).toFixed(2)}%`;
  let spent = step.time - wall;
  const parts = Object.entries(CAUSES).map(([cause, name]) => { const from = spent, s = step.efficiency?.seconds?.[cause] ?? 0; spent += s; return { cause, name, from, to: spent, s }; }).filter((p) => p.s > 0);
  const index = all.indexOf(step), link = (s, text) => (s ? html`<a class="button" href="#/steps/${s.step}">${text}</a>` : "");
  put(view, html`<p class="switch">${link(all[index - 1], "earlier step")}${link(all[index + 1], "later step")}${index < all.length - 1 ? link(all.at(-1), "newest step") : ""}</p>
  <h2>Step ${step.step}</h2><p class="words">${waits(step, attempts)}</p>
  <div class="timeline" role="group" aria-label="Timeline of step ${step.step}">
    <div class="line trainer">${parts.map((p) => html`<i class="${p.cause}" style="${at(p.from, p.to)}" title="${p.name}: ${brief(p.s)}"></i>`)}</div>
    ${attempts.slice(0, ROWS).map((a) => html`<a class="line ${a.verdict}" href="#/t/${a.seq}" title="${a.name}: ${a.verdict}, ${brief(a.to - a.from)}" aria-label="${a.name}, ${a.verdict}, ${brief(a.to - a.from)}"><i style="${at(a.from, a.to)}"></i></a>`)}</div>
  <p class="note">${brief(length)} from the first issue to the end of the step. The first row is the trainer; each other bar is an attempt from issue to score${attempts.length > ROWS ? html`, the first ${ROWS} of ${attempts.length}` : ""}.</p>
  <p class="legend"><span class="pass">passed</span><span class="fail">not passed</span>${parts.map((p) => html`<span class="${p.cause}">${p.name} ${brief(p.s)}</span>`)}</p>`);
}
