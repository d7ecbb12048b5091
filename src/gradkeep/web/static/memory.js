// Memory budget: what fewer bytes cost a training step, and what happens inside of one.
import { html, useMemo } from "./vendor/preact.js";
import { isReport, useAnswer } from "./api.js";
import { Lines, colour } from "./charts.js";
import { bytes, count, fixed, percent } from "./format.js";
import { Def, Empty, Problem, Waiting } from "./parts.js";
import { go, useKeys } from "./route.js";

const NAMES = {
  "dtr-eq": "The heuristic of dynamic tensor rematerialization with equivalence classes: cost by size and staleness.",
  "dtr-local": "The same without what depends on neighbors.",
  lru: "The least recently used goes first.",
  largest: "The largest goes first.",
};

function Curves({ view, ratio }) {
  const ratios = [...new Set(view.curves.flatMap((one) => one.points.map((point) => point.ratio)))].sort((a, b) => a - b);
  const data = [ratios.map((one) => 100 * one), ...view.curves.map((curve) => ratios.map((one) => curve.points.find((point) => point.ratio === one && point.status === "ok")?.overhead ?? null))];
  const series = view.curves.map((curve, at) => ({ label: curve.heuristic, colour: `series-${at + 1}` }));
  return html`<${Lines} title="Slowdown by budget" data=${data} series=${series} x="budget, % of the peak" y="time, \u00d7" height=${270} marker=${100 * ratio} xRange=${() => [0, 102]} yRange=${(_, low, high) => [0.95, Math.max(1.3, 1.05 * high)]} yValues=${(_, values) => values.map((one) => `${one.toFixed(2)}\u00d7`)} xValues=${(_, values) => values.map((one) => `${Math.round(one)}%`)} />`;
}

function Timeline({ view }) {
  const ticks = useMemo(
    () => ({
      draw: [
        (plot) => {
          const base = plot.bbox.top + plot.bbox.height;
          const line = (clocks, ink, from, to) => {
            plot.ctx.save();
            plot.ctx.strokeStyle = colour(ink);
            plot.ctx.globalAlpha = 0.5;
            plot.ctx.beginPath();
            clocks.forEach((clock) => {
              const x = plot.valToPos(clock, "x", true);
              plot.ctx.moveTo(x, base - from);
              plot.ctx.lineTo(x, base - to);
            });
            plot.ctx.stroke();
            plot.ctx.restore();
          };
          line(view.evictions, "minus", 0, 9);
          line(view.recomputes, "plus", 10, 19);
        },
      ],
    }),
    [view],
  );
  const data = [view.clock, view.memory, view.clock.map(() => view.budget)];
  const series = [
    { label: "in memory", colour: "series-1", points: false, stepped: true, fill: "wash" },
    { label: "budget", colour: "accent", points: false, dash: [5, 4], width: 1.2 },
  ];
  return html`<${Lines} title="Bytes in memory over one step" data=${data} series=${series} x="time of the step" y="bytes" height=${230} hooks=${ticks} yRange=${(_, low, high) => [0, 1.05 * Math.max(high, view.budget)]} yValues=${(_, values) => values.map((one) => bytes(one))} xValues=${(_, values) => values.map((one) => percent(one / Math.max(1, view.clock[view.clock.length - 1]), 0))} />`;
}

// Another heuristic that still works where the chosen one does not.
function instead(view, ratio, heuristic) {
  const fits = view.curves.flatMap((curve) => curve.points.filter((point) => point.status === "ok" && point.ratio <= ratio + 1e-9).slice(0, 1).map((point) => [point, curve.heuristic]));
  const best = fits.filter(([, name]) => name !== heuristic).sort((a, b) => a[0].overhead - b[0].overhead)[0];
  return best ? ` By ${best[1]} it takes ${best[0].overhead.toFixed(2)}\u00d7.` : "";
}

export function Memory({ place, session }) {
  const { params } = place;
  const curves = useAnswer("api/memory", { log: params.log });
  const view = curves.data;
  const heuristic = NAMES[params.by] ? params.by : "dtr-eq";
  const ratio = Math.max(0.05, Math.min(1, Number(params.budget) || 0.5));
  const keep = (more) => go({ ...place, params: { ...params, ...more } }, { replace: true });
  const set = (value) => keep({ budget: Math.max(0.05, Math.min(1, Math.round(100 * value) / 100)) });
  useKeys({ j: () => set(ratio - 0.05), k: () => set(ratio + 0.05) });
  const timeline = useAnswer(view?.curves.length ? "api/memory/timeline" : null, { log: view?.log, heuristic, ratio });
  const time = timeline.data;
  if (view && !view.logs.length)
    return html`<h1>Memory budget</h1><${Empty} title="No training step is recorded" command=${["gradkeep remat record train.py --log step.log", `gradkeep serve ${session?.location ?? "STORE"} --log step.log`]}>A recorded step says what every memory budget would cost. Logs in the store's folder <code>remat/</code> are found by themselves.</${Empty}>`;
  return html`<header class="split-head"><h1>Memory budget</h1><div class="tools row">${view && view.logs.length > 1 && !isReport && html`<label>step <select aria-label="Recorded step" value=${view.log} onChange=${(event) => keep({ log: event.target.value })}>${view.logs.map((one) => html`<option selected=${one.name === view.log} value=${one.name}>${one.name}</option>`)}</select></label>`}
      ${view && view.logs.length === 1 && html`<code>${view.log}</code>`}</div></header>
    ${!view || curves.problem ? html`<${Waiting} answer=${curves} />` : ""}
    ${view?.problem && html`<${Problem} problem=${view.problem} />`}
    ${view && view.curves.length > 0 && html`
      ${time ? html`<p class="sentence ${time.cost.status === "ok" ? "" : "bad"}">${time.sentence}${time.cost.status === "ok" ? "" : instead(view, ratio, heuristic)}</p>` : html`<${Waiting} answer=${timeline} />`}
      ${!isReport && html`<div class="tools row"><label class="slider wide"><${Def} is="The budget as a share of what the step takes without one (j and k).">budget</${Def}> <input type="range" min="0.05" max="1" step="0.05" value=${ratio} aria-label="Budget" onInput=${(event) => set(Number(event.target.value))} /> <output class="n">${percent(ratio, 0)}</output></label>
        <label>by <select aria-label="Heuristic" value=${heuristic} title=${NAMES[heuristic]} onChange=${(event) => keep({ by: event.target.value })}>${Object.keys(NAMES).map((one) => html`<option value=${one} selected=${one === heuristic}>${one}</option>`)}</select></label></div>`}
      <p class="facts"><span><${Def} is="Bytes that the step needs at once if nothing is ever recomputed.">peak</${Def}> <b class="n">${bytes(view.peak)}</b></span><span><${Def} is="Inputs, parameters and the largest single operator: no budget below this can work.">floor</${Def}> <b class="n">${bytes(view.floor)}</b></span><span><b class="n">${count(view.operators)}</b> operators</span>
        ${time && html`<span><b class="n minus-ink">${count(time.total_evictions)}</b> <${Def} is="Storages that left memory before their last use.">evictions</${Def}></span><span><b class="n plus-ink">${count(time.total_recomputes)}</b> <${Def} is="Operators that ran again to bring a value back.">recomputations</${Def}></span>${time.cost.status === "ok" && html`<span>time <b class="n">${fixed(time.cost.overhead, 2)}\u00d7</b></span>`}`}</p>
      <div class="pair"><figure><figcaption>What every budget costs; a curve ends where the step runs out of memory or takes more than 4\u00d7 the time</figcaption><${Curves} view=${view} ratio=${ratio} /></figure>
      <figure><figcaption>One step at ${percent(ratio, 0)}: ticks below are evictions, ticks above them recomputations</figcaption>${time ? html`<${Timeline} view=${time} />` : ""}</figure></div>`}`;
}
