// Runs: what was trained and captured, and how good it was at each checkpoint.
import { html } from "./vendor/preact.js";
import { Lines } from "./charts.js";
import { count, percent, when, number } from "./format.js";
import { Def, Empty, Size } from "./parts.js";
import { go, link, useKeys } from "./route.js";

function last(run, split, what) {
  const points = run.points.filter((one) => one.split === split && one[what] !== null);
  return points.length ? points[points.length - 1][what] : null;
}

function Curves({ run, what, label, format }) {
  const splits = run.splits.filter((split) => run.points.some((one) => one.split === split && one[what] !== null));
  const names = [...new Set(run.points.map((one) => one.checkpoint))];
  if (!splits.length || names.length < 2) return null;
  const data = [names.map((_, at) => at), ...splits.map((split) => names.map((name) => run.points.find((one) => one.split === split && one.checkpoint === name)?.[what] ?? null))];
  const series = splits.map((split, at) => ({ label: split, colour: `series-${at + 1}` }));
  return html`<figure><figcaption>${label}</figcaption><${Lines} title=${`${label} by checkpoint`} data=${data} series=${series} x="checkpoint" y=${label} height=${200}
    xValues=${(_, values) => values.map((one) => (Number.isInteger(one) ? (names[one] ?? "") : ""))} yValues=${(_, values) => values.map(format)} /></figure>`;
}

function Detail({ run }) {
  const config = Object.entries(run.config);
  return html`<section class="panel">
    <h2>${run.name}</h2>
    <p class="facts">${run.model && html`<span><${Def} is="The class of the model that was captured.">model</${Def}> <b>${run.model}</b></span>`}
      ${run.task && html`<span>task <b>${run.task.replace("gradkeep.", "")}</b></span>`}
      ${config.map(([name, value]) => html`<span>${name} <b>${typeof value === "object" ? JSON.stringify(value) : String(value)}</b></span>`)}</p>
    <div class="pair"><${Curves} run=${run} what="accuracy" label="accuracy" format=${(one) => percent(one)} /><${Curves} run=${run} what="loss" label="mean loss (nats)" format=${(one) => number(one)} /></div>
    <p class="actions"><a class="button" href=${link({ run: run.name, screen: "why" })}>Why this prediction</a><a class="button" href=${link({ run: run.name, screen: "suspects" })}>Suspect labels</a><a class="button" href=${link({ run: run.name, screen: "clusters" })}>Clusters</a></p>
  </section>`;
}

export function Runs({ place, runs }) {
  const at = runs.findIndex((one) => one.name === place.run);
  const move = (step) => {
    const next = runs[Math.max(0, Math.min(runs.length - 1, at + step))];
    if (next) go({ run: next.name, screen: "runs" }, { replace: true });
  };
  useKeys({ j: () => move(1), k: () => move(-1), Enter: () => go({ run: place.run, screen: "why" }) });
  if (!runs.length)
    return html`<h1>Runs</h1><${Empty} title="Nothing is captured yet" command=${["gradkeep capture CONFIG", "gradkeep demo --out gradkeep-demo"]}>Capture a trained model once, and ask everything. In Python: <code>gk.capture(store, model, loader, task=gk.Classification(), split="train")</code>.</${Empty}>`;
  return html`<header><h1>Runs</h1></header>
    <div class="scroll"><table class="list">
      <thead><tr><th>run</th><th class="r"><${Def} is="States of the weights that were captured.">checkpoints</${Def}></th><th>rows</th><th class="r"><${Def} is="The share of rows where the model says the label, at the last checkpoint.">accuracy</${Def}></th>
        <th class="r"><${Def} is="Bytes on disk, older versions included.">size</${Def}></th><th class="r"><${Def} is="How many times smaller than float32 gradients of the same layers and rows.">vs dense</${Def}></th><th>captured</th></tr></thead>
      <tbody>${runs.map((one) => html`<tr key=${one.name} class=${one.name === place.run ? "on" : ""} onClick=${() => go({ run: one.name, screen: "runs" })}>
        <td><a href=${link({ run: one.name, screen: "runs" })}><b>${one.name}</b></a>${one.unfinished > 0 && html` <a class="badge live" href=${link({ run: one.name, screen: "store" })}>${one.unfinished} unfinished</a>`}${one.problem && html` <span class="badge bad" title=${one.problem}>damaged</span>`}</td>
        <td class="r n">${one.checkpoints}</td><td class="n">${Object.entries(one.rows).map(([split, rows]) => `${split} ${count(rows)}`).join("  \u00b7  ")}</td>
        <td class="r n">${one.splits.map((split) => [split, last(one, split, "accuracy")]).filter(([, value]) => value !== null).map(([split, value]) => html`<span title=${`on ${split}`}>${percent(value)} </span>`)}</td>
        <td class="r"><${Size} value=${one.bytes} /></td><td class="r n">${one.ratio ? `${one.ratio.toFixed(1)}\u00d7` : "-"}</td><td class="n muted">${when(one.modified)}</td></tr>`)}</tbody>
    </table></div>
    ${at >= 0 && html`<${Detail} run=${runs[at]} />`}`;
}
