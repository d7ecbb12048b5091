// Evaluation: methods against metrics, each figure with its interval and its ceiling.
import { html } from "./vendor/preact.js";
import { useAnswer } from "./api.js";
import { Lines } from "./charts.js";
import { fixed } from "./format.js";
import { Def, Empty, Histogram, Problem, Waiting, Whisker } from "./parts.js";
import { go, useKeys } from "./route.js";

const METRICS = {
  lds: "The linear datamodeling score: the mean over queries of the rank correlation, over random subsets, of the summed scores of a subset's rows and what models trained on it say. 1 is perfect, 0 is chance.",
};

const interval = (one) => (one.low === null ? "no interval" : `[${fixed(one.low)}, ${fixed(one.high)}]`);

function Figure({ one, from, to, on, onPick }) {
  return html`<tr class=${on ? "on" : ""} onClick=${onPick}><th><button class="plain" title=${one.provenance}>${one.subject}</button></th>
    <td class="n r"><b>${fixed(one.value)}</b></td><td class="n muted">${interval(one)}</td>
    <td class="wide"><${Whisker} low=${one.low} high=${one.high} value=${one.value} ceiling=${one.ceiling} from=${from} to=${to} /></td>
    <td class="n r muted">${one.ceiling === null ? "-" : fixed(one.ceiling)}</td><td class="muted">${one.sizes}</td></tr>`;
}

function Detail({ one }) {
  const { curve } = one;
  return html`<section class="panel"><h2>${one.metric} <span class="muted">${one.subject}</span></h2>
    <p class="facts"><span><b class="n">${fixed(one.value)}</b> <span class="n muted">${interval(one)} at ${Math.round(100 * one.level)}%</span></span><span>${one.sizes}</span><span class="muted">held against ${one.truth}</span><span class="muted">kept as <code>${one.name}</code></span></p>
    ${one.provenance && html`<p class="muted small">${one.provenance}</p>`}
    ${curve
      ? html`<${Lines} title=${one.metric} data=${[curve.at, ...curve.values]} series=${curve.names.map((label, at) => ({ label, colour: `series-${(at % 5) + 1}` }))} x=${curve.along} y=${one.metric} height=${240} />`
      : one.items.length > 0 && html`<figure class="narrow"><figcaption>single queries, from ${fixed(one.item_range[0], 2)} to ${fixed(one.item_range[1], 2)}</figcaption><${Histogram} counts=${one.items} low=${one.item_range[0]} high=${one.item_range[1]} title="how the figures of single queries are spread" /></figure>`}</section>`;
}

export function Evaluation({ place, session }) {
  const answer = useAnswer("api/evaluations");
  const all = answer.data?.evaluations ?? [];
  const at = all.findIndex((one) => one.name === place.id);
  const order = [...new Set(all.map((one) => one.metric))].flatMap((metric) => all.filter((one) => one.metric === metric).sort((a, b) => b.value - a.value));
  const move = (step) => {
    const now = order.findIndex((one) => one.name === place.id);
    const next = order[now < 0 ? 0 : Math.max(0, Math.min(order.length - 1, now + step))];
    if (next) go({ ...place, id: next.name }, { replace: true });
  };
  useKeys({ j: () => move(1), k: () => move(-1) });
  const where = session?.location ?? "STORE";
  if (!answer.data || answer.problem) return html`<h1>Evaluation</h1><${Waiting} answer=${answer} />`;
  return html`<header><h1>Evaluation</h1><p class="muted">Do scores predict what happens? Figures with 95% intervals over queries and subsets; the upright mark is the ceiling that chance sets.</p></header>
    ${answer.data.problems.map((problem) => html`<${Problem} problem=${problem} />`)}
    ${!all.length && html`<${Empty} title="Nothing is evaluated yet" command=${[`gradkeep evaluate truth ${where} --recipe train.py:recipe`, `gradkeep evaluate lds ${where}`]}>Train models on random subsets once, then hold every method against them.</${Empty}>`}
    ${[...new Set(order.map((one) => one.metric))].map((metric) => {
      const some = order.filter((one) => one.metric === metric);
      const from = Math.min(0, ...some.map((one) => one.low ?? one.value));
      const to = Math.max(...some.map((one) => Math.max(one.high ?? one.value, one.ceiling ?? one.value)), from + 1e-9);
      return html`<section key=${metric}><h2><${Def} is=${METRICS[metric] ?? metric}>${metric === "lds" ? "LDS" : metric}</${Def}></h2><div class="scroll"><table class="list figures"><thead><tr><th>method</th><th class="r">figure</th><th>95% interval</th><th></th><th class="r"><${Def} is="What a perfect prediction would come to: models of other seeds agree no further.">ceiling</${Def}></th><th>found with</th></tr></thead>
        <tbody>${some.map((one) => html`<${Figure} key=${one.name} one=${one} from=${from} to=${to} on=${one.name === place.id} onPick=${() => go({ ...place, id: one.name }, { replace: true })} />`)}</tbody></table></div></section>`;
    })}
    ${at >= 0 && html`<${Detail} one=${all[at]} key=${all[at].name} />`}`;
}
