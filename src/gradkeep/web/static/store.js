// Store: what it holds, how large that is against dense gradients, how sound, and what is being written.
import { html, useState } from "./vendor/preact.js";
import { isReport, send, useAnswer } from "./api.js";
import { bytes, count, number, when } from "./format.js";
import { Command, Def, Empty, Size, Waiting } from "./parts.js";
import { go, useKeys } from "./route.js";

function Health({ location }) {
  const [begun, setBegun] = useState(false);
  const found = useAnswer(begun ? "api/health" : null, {}, { version: begun });
  const begin = async () => {
    await send("api/health");
    setBegun((old) => (old || 0) + 1);
  };
  const health = found.data;
  return html`<section class="panel health"><h3><${Def} is="Every file is read and compared with its checksums and with what names it.">Health</${Def}></h3>
    ${isReport ? html`<${Command} line=${`gradkeep verify ${location}`} />` : html`<button onClick=${begin} disabled=${begun && !health && !found.problem}>${health ? "verify again" : "verify every byte"}</button>`}
    ${begun && !health ? html`<${Waiting} answer=${found} />` : ""}
    ${health && html`<p class=${health.healthy ? "plus-ink" : "minus-ink"}><b>${health.healthy ? "\u2713 sound" : `\u2717 ${count(health.damaged)} damaged`}</b> <span class="muted">${count(health.files)} files, ${bytes(health.bytes)}${health.orphans ? `, ${health.orphans} unfinished writes` : ""}${health.unknown ? `, ${health.unknown} foreign files` : ""}</span></p>
      ${health.damage.length > 0 && html`<ul class="damage">${health.damage.map((one) => html`<li><code>${one.path}</code> ${one.what}</li>`)}</ul><${Command} line=${`gradkeep verify ${location} --repair`} />`}`}</section>`;
}

function State({ one }) {
  if (one.problem) return html`<span class="badge bad" title=${one.problem}>unreadable</span>`;
  if (one.state === "sealed") return html`<span class="muted">sealed</span>`;
  return html`<span class="badge live">${one.wanted ? html`<progress value=${one.rows} max=${one.wanted}></progress> ${Math.round((100 * one.rows) / Math.max(1, one.wanted))}%` : "being written"}</span>`;
}

export function Store({ place, session }) {
  const answer = useAnswer("api/store", {}, { refresh: (data) => (data.blocks.some((one) => one.state === "open") || data.row_sets.some((one) => one.leased) ? 1500 : 10000) });
  const view = answer.data;
  const path = (one) => [one.run, one.checkpoint, one.split, one.name].filter(Boolean).join("/");
  const blocks = view?.blocks ?? [];
  const at = blocks.findIndex((one) => `${one.kind}:${path(one)}` === place.id);
  const pick = (one) => go({ ...place, id: `${one.kind}:${path(one)}` }, { replace: true });
  useKeys({ j: () => blocks.length && pick(blocks[Math.min(blocks.length - 1, at + 1)]), k: () => blocks.length && pick(blocks[Math.max(0, at - 1)]) });
  if (!view || answer.problem) return html`<h1>Store</h1><${Waiting} answer=${answer} />${answer.problem && html`<${Health} location=${session?.location ?? "STORE"} />`}`;
  const kinds = [...new Set(blocks.map((one) => one.kind))];
  const layered = blocks[at]?.layers.length ? blocks[at] : blocks.find((one) => one.layers.length);
  const words = { capture: "Captures", scores: "Scores", basis: "Bases", evaluation: "Evaluations" };
  return html`<header><h1>Store</h1><p class="facts"><span><code>${view.location}</code></span><span><b class="n">${bytes(view.bytes)}</b> on disk</span>${view.ratio && html`<span><b class="n">${view.ratio.toFixed(1)}\u00d7</b> <${Def} is=${`Dense float32 gradients of the same layers and rows would take ${bytes(view.dense_bytes)}.`}>smaller than dense</${Def}></span>`}</p></header>
    ${view.ratio && html`<div class="against" title="kept, against dense gradients"><i style=${{ width: `${Math.max(0.6, 100 / view.ratio)}%` }}></i><span>kept ${bytes(view.dense_bytes / view.ratio)}</span><span class="muted">dense ${bytes(view.dense_bytes)}</span></div>`}
    ${!blocks.length && !view.row_sets.length && html`<${Empty} title="The store is empty" command="gradkeep capture CONFIG">Nothing was captured into it yet.</${Empty}>`}
    ${kinds.map((kind) => html`<section key=${kind}><h2>${words[kind] ?? kind}</h2><div class="scroll"><table class="list"><thead><tr><th>${kind === "capture" ? html`<${Def} is="run / checkpoint / split / name">capture</${Def}>` : "name"}</th><th class="r">rows</th><th class="r">size</th><th class="r">dense</th><th class="r">ratio</th><th>state</th><th>modified</th></tr></thead>
      <tbody>${blocks.filter((one) => one.kind === kind).map((one) => html`<tr key=${path(one)} class=${blocks[at] === one ? "on" : ""} onClick=${() => pick(one)}><td>${path(one)}${one.keep ? html` <span class="muted">${one.keep}</span>` : ""}</td><td class="r n">${count(one.rows)}${one.wanted && one.wanted !== one.rows ? html`<span class="muted"> of ${count(one.wanted)}</span>` : ""}</td><td class="r"><${Size} value=${one.bytes} /></td><td class="r n muted">${one.dense_bytes ? bytes(one.dense_bytes) : "-"}</td><td class="r n">${one.ratio ? `${one.ratio.toFixed(1)}\u00d7` : "-"}</td><td><${State} one=${one} /></td><td class="n muted">${when(one.modified)}</td></tr>`)}</tbody></table></div></section>`)}
    ${view.row_sets.length > 0 && html`<section><h2><${Def} is="Rows that many processes write: trainings on subsets, retrainings.">Studies</${Def}></h2><div class="scroll"><table class="list"><thead><tr><th>name</th><th class="r">done</th><th class="r">running</th><th class="r">failed</th><th class="r">pending</th><th class="r">size</th></tr></thead><tbody>${view.row_sets.map((one) => html`<tr><td>${one.name}${one.problem && html` <span class="badge bad" title=${one.problem}>unreadable</span>`}</td><td class="r n">${count(one.done)}</td><td class="r n">${count(one.leased)}</td><td class="r n">${count(one.failed)}</td><td class="r n">${count(one.pending)}</td><td class="r"><${Size} value=${one.bytes} /></td></tr>`)}</tbody></table></div></section>`}
    <div class="pair">${layered && html`<section class="panel"><h3>Layers <span class="muted">${path(layered)}</span></h3><div class="scroll"><table class="list"><thead><tr><th>layer</th><th>type</th><th class="r">parameters</th><th class="r"><${Def} is="Bytes kept of one row.">a row</${Def}></th><th class="r">dense</th><th class="r">ratio</th></tr></thead><tbody>${layered.layers.map((one) => html`<tr><td>${one.name}</td><td class="muted">${one.type}</td><td class="r n">${count(one.parameters)}</td><td class="r n">${bytes(one.row_bytes)}</td><td class="r n muted">${bytes(one.dense_row_bytes)}</td><td class="r n">${one.row_bytes ? `${number(one.dense_row_bytes / one.row_bytes, 3)}\u00d7` : "-"}</td></tr>`)}</tbody></table></div></section>`}
    <${Health} location=${view.location} /></div>`;
}
