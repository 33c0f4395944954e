// The line that is always there: step, version, reward with its interval, tokens per second, staleness, use, cost, alarms.
import { brief, count, html, number, percent, span } from "../html.js";
import { gauge, state, stepsInOrder, tokensPerSecond, total } from "../state.js";

export const SILENT_S = 10;

export function interval(values) {
  if (values.length < 2) return null;
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  const variance = values.reduce((a, b) => a + (b - mean) ** 2, 0) / (values.length - 1);
  return 1.96 * Math.sqrt(variance / values.length);
}

export function quantile(staleness, share) {
  const ages = Object.entries(staleness ?? {}).map(([age, n]) => [Number(age), n]).sort((a, b) => a[0] - b[0]);
  const sum = ages.reduce((a, [, n]) => a + n, 0);
  let passed = 0;
  for (const [age, n] of ages) { passed += n; if (passed >= share * sum) return age; }
  return null;
}

export function alarms() {
  const out = [], now = Date.now() / 1000, steps = stepsInOrder(), last = steps.at(-1);
  if (state.fault) out.push(["bad", state.fault]);
  if (!state.connected && state.since) out.push(["bad", `the broker does not answer; trying since ${span((Date.now() - state.since) / 1000)}`]);
  if (last?.alarm) out.push(["bad", `step ${last.step}: ${last.alarm}`]);
  if (last && last.staleness_max > last.staleness_bound) out.push(["bad", `staleness ${last.staleness_max} is above the bound ${last.staleness_bound}`]);
  if (steps.length > 2 && !state.finished) {
    const times = steps.slice(-10).map((s) => s.seconds + s.waited_s).sort((a, b) => a - b), median = times[times.length >> 1];
    if (now - last.time > Math.max(60, 3 * median)) out.push(["warn", `no step for ${span(now - last.time)}; the median is ${span(median)}`]);
  }
  const silent = state.finished ? [] : [...state.actors.values()].filter((a) => now - a.at > SILENT_S && a.beat.state !== "stopped");
  if (silent.length) out.push(["bad", `no heartbeat from ${silent.map((a) => a.key).join(", ")} for ${span(Math.max(...silent.map((a) => now - a.at)))}`]);
  const recent = state.events.filter((e) => e.level === "error" && now - e.time < 120);
  if (recent.length) out.push(["warn", `${recent.length} error ${recent.length === 1 ? "event" : "events"} in two minutes, last: ${recent.at(-1).actor} ${recent.at(-1).kind}`]);
  return out;
}

// Mean of the nodes' use of processors or GPUs: each node's newest heartbeat tells its own. Null where none does.
export function use(live, name) {
  const nodes = new Map();
  for (const a of live) if (Number.isFinite(a.beat[name]) && !(nodes.get(a.beat.node)?.at > a.at)) nodes.set(a.beat.node, a);
  const shares = [...nodes.values()].map((a) => a.beat[name]);
  return shares.length ? { mean: shares.reduce((a, b) => a + b, 0) / shares.length, nodes: shares.length } : null;
}

const ENDS = 5;
// A page that has no records after this time is not connected.
const LOADING_MS = 5000;

// Whether attempts pass more often than at the start, from the first and the last five steps; null before there are ten.
export function learning(steps) {
  if (!steps.length) return null;
  if (steps.length < 2 * ENDS) return `Is it learning? Too early to say: ${steps.length} of ${2 * ENDS} steps.`;
  const [first, last] = [steps.slice(0, ENDS), steps.slice(-ENDS)].map((part) => {
    const attempts = part.reduce((sum, s) => sum + (s.trained_slots ?? 0), 0) || part.length;
    return { rate: part.reduce((sum, s) => sum + s.pass_rate, 0) / ENDS, attempts };
  });
  const spread = 1.96 * Math.sqrt([first, last].reduce((sum, { rate, attempts }) => sum + rate * (1 - rate) / attempts, 0));
  const change = last.rate - first.rate, verdict = change > spread ? "Yes" : change < -spread ? "No, it gets worse" : "Not certain";
  return `Is it learning? ${verdict}: ${percent(first.rate)} of attempts passed in the first ${ENDS} steps, ${percent(last.rate)} in the last ${ENDS} (± ${percent(spread)}).`;
}

const CAUSES = { busy: "computes", batch: "waits for batches", rescore: "scores trajectories again", straggler: "waits for a slower process", communication: "exchanges gradients", publish: "publishes versions", checkpoint: "writes checkpoints", records: "reads records" };

// What most of the newest steps' time goes to.
export function slowness(steps) {
  const spent = new Map();
  for (const { efficiency } of steps.slice(-ENDS)) for (const [cause, seconds] of Object.entries(efficiency?.seconds ?? {})) spent.set(cause, (spent.get(cause) ?? 0) + seconds);
  const wall = [...spent.values()].reduce((a, b) => a + b, 0);
  if (!wall) return null;
  const [cause, seconds] = [...spent].sort((a, b) => b[1] - a[1])[0];
  const bound = cause === "batch" ? "sampling, sandboxes or judges limit the speed" : "the trainer limits the speed";
  return `Why is it slow? The trainer ${CAUSES[cause] ?? `spends its time on ${cause}`} ${percent(seconds / wall)} of its time: ${bound}.`;
}

const nodesOf = (n) => `of ${n} ${n === 1 ? "node" : "nodes"}`;
const tile = (name, value, note = "", kind = "") => html`<div class="tile ${kind}"><span>${name}</span><strong>${value}</strong><em>${note}</em></div>`;

export function header() {
  const s = state.settings, steps = stepsInOrder(), last = steps.at(-1);
  const rewards = [...state.scores.values()].filter((x) => x.lane === "train").slice(-(s.batch ?? 64)).map((x) => x.reward);
  const wide = interval(rewards), mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  const now = Date.now() / 1000, began = s.started || 0, until = state.finished ? Math.max(...state.events.map((e) => e.time)) : now;
  const hours = began ? (until - began) / 3600 : 0;
  const price = (s.gpu_hour ?? 0) * (s.gpus ?? 0) + (s.core_hour ?? 0) * (s.cores ?? 0);
  const live = [...state.actors.values()].filter((a) => now - a.at < SILENT_S && a.beat.state !== "stopped");
  const busy = live.length ? live.reduce((a, x) => a + (x.beat.busy ?? 0), 0) / live.length : null;
  const cpu = use(live, "cpu"), gpu = use(live, "gpu");
  const list = alarms(), words = [learning(steps), slowness(steps)].filter(Boolean);
  const kind = !state.loaded && !state.fault && !state.since && performance.now() < LOADING_MS ? "loading" : !state.connected ? "off" : state.finished ? "done" : "live";
  if (kind === "loading") return html`<div class="title"><h1>${s.run ?? "headrace"}</h1><span class="state">loading</span></div>`;
  return html`<div class="title"><h1>${s.run ?? "…"}</h1>
    <span class="state ${kind}">${kind === "off" ? "not connected" : kind === "done" ? "finished" : kind}</span>
    <span class="phase">${state.phase && !state.finished ? state.phase : ""}</span><span class="grow"></span>
    <span class="phase">${began ? span(until - began) : ""}</span></div>
  <div class="tiles">
    ${tile("step", last ? `${last.step + 1}` : "–", s.steps ? `of ${s.steps}` : "")}
    ${tile("version", last ? last.version : "–", total("rollout", "version") !== null ? `served ${Math.min(...[...state.metrics.values()].filter((m) => m.actor === "rollout" && m.values.version !== undefined).map((m) => m.values.version))}` : "")}
    ${tile("reward", number(mean), wide === null ? "" : `± ${number(wide)}, newest ${rewards.length}`)}
    ${tile("pass rate", percent(last?.pass_rate), last ? "newest step" : "")}
    ${tile("tokens/s", count(tokensPerSecond()), total("rollout", "sampled_tokens") === null ? "" : `${count(total("rollout", "sampled_tokens"))} sampled`)}
    ${tile("staleness", last ? `${quantile(last.staleness, 0.5) ?? 0} / ${quantile(last.staleness, 0.99) ?? 0}` : "–", last ? `p50 / p99, bound ${last.staleness_bound}` : "", last && last.staleness_max > last.staleness_bound ? "bad" : "")}
    ${tile("step time", last ? brief(last.seconds + last.waited_s) : "–", last ? `${span(last.waited_s)} waiting` : "")}
    ${tile("actors", `${live.length}`, busy === null ? "" : `${percent(busy)} busy`)}
    ${cpu ? tile("CPU", percent(cpu.mean), nodesOf(cpu.nodes)) : ""}
    ${gpu ? tile("GPU", percent(gpu.mean), nodesOf(gpu.nodes)) : ""}
    ${tile("sandboxes", count(gauge("environment", "sandboxes")), gauge("environment", "vms") === null ? "" : `${count(gauge("environment", "vms"))} machines`)}
    ${price > 0 ? tile("cost", (price * hours).toFixed(2), `${price.toFixed(2)} per hour`) : ""}
  </div>
  ${words.length ? html`<p class="words">${words.join(" ")}</p>` : ""}
  ${list.length ? html`<ul class="alarms">${list.map(([kind, text]) => html`<li class="${kind}">${text}</li>`)}</ul>` : ""}`;
}
