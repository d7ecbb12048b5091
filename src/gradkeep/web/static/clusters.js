// Clusters: rows in the plane; draw around some to see them, or set two groups against each other.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { isReport, useAnswer } from "./api.js";
import { colour } from "./charts.js";
import { count, fixed, labelled, percent } from "./format.js";
import { Def, Empty, Shown, Waiting, hasLook } from "./parts.js";
import { go, useKeys } from "./route.js";

const HUES = 8;
const SHAPES = ["circle", "square", "diamond"];

function inside(polygon, x, y) {
  let hit = false;
  for (let i = 0, j = polygon.length - 1; i < polygon.length; j = i++) {
    const [xi, yi] = polygon[i];
    const [xj, yj] = polygon[j];
    if (yi > y !== yj > y && x < ((xj - xi) * (y - yi)) / (yj - yi) + xi) hit = !hit;
  }
  return hit;
}

function mark(context, shape, x, y, r) {
  context.beginPath();
  if (shape === "square") context.rect(x - r, y - r, 2 * r, 2 * r);
  else if (shape === "diamond") {
    context.moveTo(x, y - 1.3 * r);
    context.lineTo(x + 1.3 * r, y);
    context.lineTo(x, y + 1.3 * r);
    context.lineTo(x - 1.3 * r, y);
  } else context.arc(x, y, r, 0, 7);
  context.fill();
}

function Map({ view, groups, selected, onLasso, onPoint }) {
  const canvas = useRef(null);
  const [lasso, setLasso] = useState([]);
  const [wide, setWide] = useState(600);
  const high = Math.min(520, Math.max(300, Math.round(wide * 0.72)));
  const scale = useMemo(() => {
    const ends = (values) => [Math.min(...values), Math.max(...values)];
    const [x0, x1] = ends(view.x);
    const [y0, y1] = ends(view.y);
    const pad = 14;
    return {
      x: (value) => pad + ((value - x0) / Math.max(1e-9, x1 - x0)) * (wide - 2 * pad),
      y: (value) => high - pad - ((value - y0) / Math.max(1e-9, y1 - y0)) * (high - 2 * pad),
    };
  }, [view, wide, high]);
  useEffect(() => {
    const element = canvas.current.parentElement;
    const watch = new ResizeObserver(() => setWide(Math.max(260, element.clientWidth)));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    const draw = () => {
      const dense = window.devicePixelRatio || 1;
      const element = canvas.current;
      if (!element) return;
      element.width = wide * dense;
      element.height = high * dense;
      const context = element.getContext("2d");
      context.scale(dense, dense);
      const inks = Array.from({ length: HUES }, (_, at) => colour(`cluster-${at + 1}`));
      const r = view.ids.length > 1500 ? 2 : 2.8;
      view.ids.forEach((_, at) => {
        const group = view.cluster[at];
        const on = !selected || selected.has(at);
        context.globalAlpha = on ? 0.85 : 0.13;
        context.fillStyle = inks[group % HUES];
        mark(context, SHAPES[Math.floor(group / HUES) % 3], scale.x(view.x[at]), scale.y(view.y[at]), on && selected ? r + 0.6 : r);
      });
      if (lasso.length > 1) {
        context.globalAlpha = 1;
        context.strokeStyle = colour("ink");
        context.setLineDash([4, 3]);
        context.beginPath();
        lasso.forEach(([x, y], at) => (at ? context.lineTo(x, y) : context.moveTo(x, y)));
        context.stroke();
      }
    };
    draw();
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    return () => dark.removeEventListener("change", draw);
  }, [view, selected, lasso, wide, high]);
  const spot = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const down = (event) => {
    canvas.current.setPointerCapture(event.pointerId);
    setLasso([spot(event)]);
  };
  const moved = (event) => lasso.length && setLasso((old) => (old.length < 2000 ? [...old, spot(event)] : old));
  const up = (event) => {
    const drawn = [...lasso, spot(event)];
    setLasso([]);
    if (drawn.length > 4) {
      const hits = view.ids.map((_, at) => at).filter((at) => inside(drawn, scale.x(view.x[at]), scale.y(view.y[at])));
      return onLasso(hits);
    }
    const [px, py] = drawn[0];
    let best = -1;
    let near = 144;
    view.ids.forEach((_, at) => {
      const far = (scale.x(view.x[at]) - px) ** 2 + (scale.y(view.y[at]) - py) ** 2;
      if (far < near) [near, best] = [far, at];
    });
    onPoint(best);
  };
  return html`<div class="map"><canvas ref=${canvas} style=${{ width: `${wide}px`, height: `${high}px` }} onPointerDown=${down} onPointerMove=${moved} onPointerUp=${up} role="img" aria-label=${`${count(view.ids.length)} rows in the plane, ${groups.length} clusters`}></canvas>
    <p class="axes muted small"><${Def} is="The first two principal components of the rows' directions, with the share of the variance along each. Rows that are near each other act alike.">axes</${Def}> ${percent(view.share[0])} and ${percent(view.share[1])} of the variance${view.total > view.ids.length ? html`; ${count(view.ids.length)} of ${count(view.total)} rows, by chance` : ""}</p></div>`;
}

function Members({ title, ids, split, run, name }) {
  const shown = ids.slice(0, 40);
  const found = useAnswer(shown.length ? "api/rows" : null, { run, split, name, row: shown });
  return html`<section class="members"><h3>${title} <span class="muted n">${count(ids.length)}</span></h3>
    ${shown.length && !found.data ? html`<${Waiting} answer=${found} />` : ""}
    <ul class="grid">${(found.data ?? []).map((row) => html`<li key=${row.id} title=${`#${row.id}, label ${labelled(row.label, row.label_name)}${row.predicted !== null ? `, model says ${labelled(row.predicted, row.predicted_name)}` : ""}`}>${hasLook(row) ? html`<${Shown} shown=${row.shown} />` : ""}<span class="caption"><span class="n id">${row.id}</span> <b>${labelled(row.label, row.label_name)}</b></span></li>`)}</ul></section>`;
}

export function Clusters({ place, run }) {
  const { params } = place;
  const split = params.split ?? run?.train ?? "train";
  const queries = params.queries ?? run?.queries ?? "test";
  const name = params.name ?? run?.captures[0] ?? "main";
  const of = params.of ?? "gradients";
  const clusters = Math.max(1, Math.min(24, Number(params.n) || 8));
  const answer = useAnswer(run ? "api/clusters" : null, { run: place.run, split, queries, name, of, clusters });
  const view = answer.data;
  const chosen = (params.show ?? "").split(",").filter(Boolean).map(Number);
  const [lasso, setLasso] = useState(null);
  const keep = (more, options) => {
    setLasso(null);
    go({ ...place, params: { ...params, ...more } }, options);
  };
  const groups = view?.clusters ?? [];
  const step = (by) => groups.length && keep({ show: String(((chosen[0] ?? (by > 0 ? -1 : 0)) + by + groups.length) % groups.length) }, { replace: true });
  useKeys({ j: () => step(1), k: () => step(-1), Escape: () => keep({ show: "" }, { replace: true }) });
  const called = (number) => {
    const one = groups[number];
    return one && one.label !== null ? `${number + 1}: label ${labelled(one.label, one.label_name)} (${percent(one.purity, 0)})` : `${number + 1}`;
  };
  const selected = useMemo(() => {
    if (lasso) return new Set(lasso);
    if (!view || !chosen.length) return null;
    return new Set(view.cluster.map((_, at) => at).filter((at) => chosen.includes(view.cluster[at])));
  }, [view, params.show, lasso]);
  if (!run) return html`<h1>Clusters</h1><${Empty} title="There is no such run" command="gradkeep capture CONFIG">Capture gradients of the training rows.</${Empty}>`;
  const idsOf = (number) => view.ids.filter((_, at) => view.cluster[at] === number);
  return html`<header class="split-head"><h1>Clusters</h1><div class="tools row">
      ${view && !isReport && html`<label>of <select aria-label="Map of" value=${of} onChange=${(event) => keep({ of: event.target.value, show: "" })}>${view.sources.map((one) => html`<option value=${one} selected=${one === of}>${one.replace(":", " ")}</option>`)}</select></label>
      <label>clusters <input type="number" min="2" max="24" value=${clusters} aria-label="Number of clusters" onChange=${(event) => keep({ n: event.target.value, show: "" })} /></label>`}
      <span class="muted small">draw around rows to see them; click one for its cluster</span></div></header>
    ${answer.problem || !view ? html`<${Waiting} answer=${answer} />` : ""}
    ${view && !answer.problem && html`<div class="clusters"><div>
        <${Map} view=${view} groups=${groups} selected=${selected} onLasso=${(hits) => setLasso(hits.length ? hits : null)} onPoint=${(at) => keep({ show: at < 0 ? "" : String(view.cluster[at]) })} />
        <ul class="legend">${groups.map((one) => html`<li key=${one.number}><button class=${chosen.includes(one.number) && !lasso ? "on" : ""} onClick=${() => keep({ show: String(one.number) })}><i class=${`swatch c${(one.number % HUES) + 1}`}></i>${called(one.number)} <span class="n muted">${count(one.size)}</span></button></li>`)}</ul>
      </div><div>
        ${view.opposing.length > 0 && html`<section><h3><${Def} is="Pairs of clusters whose mean gradients point against each other: training on one undoes the other. The cosine of the two means; -1 is straight against.">Opposed</${Def}></h3><ul class="opposed">${view.opposing.map((pair) => html`<li><button class=${chosen.length === 2 && chosen[0] === pair.first && chosen[1] === pair.second ? "on" : ""} onClick=${() => keep({ show: `${pair.first},${pair.second}` })}><span class="n minus-ink">${fixed(pair.cosine, 2)}</span> ${called(pair.first)} \u2194 ${called(pair.second)}</button></li>`)}</ul></section>`}
        ${lasso ? html`<${Members} title="Drawn around" ids=${lasso.map((at) => view.ids[at])} split=${view.split} run=${place.run} name=${name} />` : chosen.length ? html`<div class=${chosen.length > 1 ? "pair" : ""}>${chosen.filter((one) => groups[one]).map((one) => html`<${Members} key=${one} title=${`Cluster ${called(one)}`} ids=${idsOf(one)} split=${view.split} run=${place.run} name=${name} />`)}</div>` : html`<p class="muted">${isReport ? "Choose a cluster." : "Draw around rows, or choose a cluster."}</p>`}
      </div></div>`}`;
}
