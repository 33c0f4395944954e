// Line charts that stay while their data changes (uPlot), and small ones without axes.
import uPlot from "uplot";
import { html } from "../html.js";

const tick = (v) => (v && Math.abs(v) < 0.1 ? String(Number(v.toPrecision(2))) : v.toLocaleString(undefined, { maximumFractionDigits: 3 }));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function charts(parent) {
  const made = new Map();
  const resize = () => made.forEach(({ plot, box }) => { if (box.clientWidth && box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height: 190 }); });
  const watcher = new ResizeObserver(resize); // a chart that is added changes the columns of those before it
  watcher.observe(parent);
  return {
    draw(id, title, xs, series) {
      let entry = made.get(id);
      if (!entry) {
        const figure = document.createElement("figure");
        figure.innerHTML = "<figcaption></figcaption><div></div>";
        figure.firstChild.textContent = title;
        parent.append(figure);
        const box = figure.lastChild, soft = colour("--soft"), rule = colour("--rule");
        const axis = { stroke: soft, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 }, font: "11px system-ui" };
        const plot = new uPlot({
          width: box.clientWidth || 400, height: 190, scales: { x: { time: false } }, legend: { live: true },
          cursor: { points: { size: 6 } },
          axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], size: 30 }, { ...axis, size: 56, values: (_, ticks) => ticks.map((v) => (v === null ? "" : tick(v))) }],
          series: [{ label: "step" }, ...series.map(({ name, stroke, dash, fill }) => ({ label: name, stroke: colour(stroke), width: 1.6, dash, fill: fill ? `${colour(stroke)}22` : undefined, points: { show: xs.length < 2 } , value: (_, v) => (v === null || v === undefined ? "–" : Number(v.toPrecision(4))) }))],
        }, [xs, ...series.map((s) => s.values)], box);
        entry = { plot, box, figure };
        made.set(id, entry);
        resize();
      } else entry.plot.setData([xs, ...series.map((s) => s.values)]);
      entry.figure.classList.toggle("none", series.every((s) => s.values.every((v) => v === null || v === undefined)));
    },
    end() { watcher.disconnect(); made.forEach(({ plot }) => plot.destroy()); },
  };
}

export function spark(values, top = 1, width = 120, height = 22) {
  if (!values.length) return "";
  const x = (i) => (values.length < 2 ? 0 : (i * width) / (values.length - 1)), y = (v) => height - 1 - (Math.min(v, top) / top) * (height - 2);
  const points = values.map((v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
  return html`<svg class="spark" viewBox="0 0 ${width} ${height}" preserveAspectRatio="none"><polygon points="0,${height} ${points} ${width},${height}"/><polyline points="${points}"/></svg>`;
}

export function bars(entries, { unit = "", mark = null } = {}) {
  const top = Math.max(1e-9, ...entries.map(([, value]) => value));
  return html`<div class="bars">${entries.map(([name, value, kind]) => html`<span>${name}</span><div class="track"><i class="${kind ?? ""}" style="width:${((100 * value) / top).toFixed(1)}%"></i></div><span class="n">${value.toLocaleString()}${unit}</span>`)}${mark ? html`<p class="note">${mark}</p>` : ""}</div>`;
}
