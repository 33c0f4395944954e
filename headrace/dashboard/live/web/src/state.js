// The run as the page knows it: a fold over records. History and live records take the same path, so repeats are harmless.
export const state = {
  settings: {}, connected: false, since: "", steps: new Map(), failed: new Map(), actors: new Map(), metrics: new Map(),
  groups: new Map(), scores: new Map(), evals: new Map(), events: [], letters: new Map(), traffic: new Map(),
  versions: new Map(), counts: { read: 0, unreadable: 0, refused: 0 }, phase: "", users: null, rates: [], finished: false, loaded: false,
};
const seen = new Set();
const EVENTS = 400;

const group = (name) => {
  if (!state.groups.has(name)) state.groups.set(name, { name, lane: "", index: 0, size: 0, slots: new Map(), fate: "open", why: "", step: -1, time: 0 });
  return state.groups.get(name);
};
const slot = (name, number) => {
  const slots = group(name).slots;
  if (!slots.has(number)) slots.set(number, { slot: number, attempts: 0, lost: [] });
  return slots.get(number);
};
const ours = (record) => record.run === state.settings.run;

const folds = {
  step_done(r) { state.steps.set(r.step, r); state.failed.delete(r.step); for (const name of r.groups) { const g = group(name); g.step = r.step; g.fate = "trained"; } },
  step_failed(r) { state.failed.set(r.step, r); for (const name of r.groups) { const g = group(name); g.step = r.step; g.fate = "dropped"; g.why = "step failed"; } },
  slot_issued(r) {
    const g = group(r.group);
    Object.assign(g, { lane: r.lane, index: r.index, size: r.group_size, task: task(r.task), time: g.time || r.time });
    const s = slot(r.group, r.slot);
    s.attempts = Math.max(s.attempts, (r.attempt ?? 0) + 1);
    s.issued = Math.min(s.issued ?? r.time, r.time);
  },
  slot_failed(r) { const s = slot(r.group, r.slot); if (!s.lost.some((l) => l.attempt === r.attempt)) s.lost.push({ attempt: r.attempt, reason: r.reason }); },
  score(r) {
    const made = { ...r, task: task(r.task) };
    state.scores.set(r.trajectory_seq, made);
    const g = group(r.group);
    g.lane ||= r.lane;
    slot(r.group, r.slot).score = made;
  },
  group_closed(r) {
    const g = group(r.group);
    if (g.fate === "open") g.fate = "closed";
    g.size ||= r.group_size;
    g.dropped = r.dropped_slots ?? {};
  },
  group_dropped(r) { Object.assign(group(r.group), { fate: "dropped", why: r.reason, detail: r.detail }); },
  beat(r) {
    if (r.run && !ours(r)) return;
    const generated = r.id.startsWith(`${r.actor}-`), key = generated ? r.actor : `${r.actor} ${r.id}`;
    const before = state.actors.get(key) ?? { history: [] };
    if (before.beat && r.time < before.at) return;
    before.history.push(r.state === "stopped" ? 0 : r.busy ?? 0);
    if (before.history.length > 60) before.history.shift();
    state.actors.set(key, { key, beat: r, at: r.time, history: before.history });
  },
  metric(r) {
    if (!ours(r)) return;
    const key = `${r.actor}:${r.id}`, before = state.metrics.get(key);
    if (r.actor === "rollout" && before && r.values.sampled_tokens !== undefined) {
      const tokens = r.values.sampled_tokens - before.values.sampled_tokens, seconds = r.time - before.time;
      if (seconds > 0 && tokens >= 0) state.rates.push({ time: r.time, key, rate: tokens / seconds });
      if (state.rates.length > 600) state.rates.splice(0, 300);
    }
    state.metrics.set(key, { actor: r.actor, values: { ...before?.values, ...r.values }, time: r.time });
  },
  traffic(r) { state.traffic.set(`${r.region} ${r.server ?? ""}`, r); },
  weights_swapped(r) { state.versions.set(r.rollout ?? r.id ?? r.subject, r); },
  eval_result(r) { state.evals.set(r.id, r); },
  dead_letter(r) { state.letters.set(`${r.stream} ${r.stream_seq} ${r.consumer}`, r); },
  letter_settled(r) { const l = state.letters.get(`${r.stream} ${r.stream_seq} ${r.consumer}`); if (l) l.settled = r.how; },
  event(r) {
    if (r.run && !ours(r)) return;
    const key = `${r.time.toFixed(2)} ${r.actor} ${r.kind} ${r.text}`;
    if (seen.has(key)) return;
    seen.add(key);
    if (r.kind === "phase") state.phase = r.text;
    if (r.kind === "run_finished") { state.phase = "finished"; state.finished = true; }
    state.events.push(r);
    state.events.sort((a, b) => a.time - b.time);
    if (state.events.length > EVENTS) state.events.splice(0, state.events.length - EVENTS);
  },
};

const task = (ref) => (Array.isArray(ref) ? { suite: ref[0], task: ref[1] } : ref ?? { suite: "", task: "" });

export let version = 0;
export function apply(record) {
  folds[record.type]?.(record);
  version++;
}
export function touch() { version++; }

export const stepsInOrder = () => [...state.steps.values()].sort((a, b) => a.step - b.step);
export const total = (actor, name) => {
  let sum = 0, known = false;
  for (const m of state.metrics.values()) if (m.actor === actor && m.values[name] !== undefined) { sum += m.values[name]; known = true; }
  return known ? sum : null;
};
// A figure as it is now: actors whose metric is older than the newest one of their kind by three seconds have ended.
export const gauge = (actor, name) => {
  const told = [...state.metrics.values()].filter((m) => m.actor === actor && m.values[name] !== undefined);
  const newest = Math.max(...told.map((m) => m.time));
  return told.length ? told.filter((m) => newest - m.time < 3).reduce((sum, m) => sum + m.values[name], 0) : null;
};
export function tokensPerSecond() {
  const now = Date.now() / 1000, latest = new Map();
  for (const r of state.rates) if (now - r.time < 15) latest.set(r.key, r.rate);
  return latest.size ? [...latest.values()].reduce((a, b) => a + b, 0) : null;
}
export function outcome(g) {
  const scores = [...g.slots.values()].map((s) => s.score).filter(Boolean);
  if (!scores.length) return "none";
  const passed = scores.filter((s) => s.passed).length;
  return passed === 0 ? "fail" : passed === scores.length ? "pass" : "mixed";
}
