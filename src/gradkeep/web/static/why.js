// Why this prediction: pick a query, see which training rows helped and which hurt.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { ask, address, isReport, useAnswer } from "./api.js";
import { count, fixed, labelled, number, percent, signed } from "./format.js";
import { Def, Empty, Histogram, Label, Problem, Shown, Tokens, Waiting, Working, hasLook } from "./parts.js";
import { go, useKeys } from "./route.js";

const FILTERS = [
  ["all", "all", "Every query of the split."],
  ["wrong", "wrong", "The model says another label; the largest loss first."],
  ["unsure", "unsure", "The model gives the label between 10% and 90%; the least sure first."],
];

function Picker({ place, queries, name, id, onPick }) {
  const { show = "all", search = "" } = place.params;
  const [typed, setTyped] = useState(search);
  const [more, setMore] = useState(40);
  const list = useAnswer("api/queries", { run: place.run, split: queries, name, show, search, count: more });
  const keep = (params) => go({ ...place, params: { ...place.params, ...params } }, { replace: true });
  useEffect(() => {
    const timer = setTimeout(() => typed !== search && keep({ search: typed }), 200);
    return () => clearTimeout(timer);
  }, [typed]);
  const rows = list.data?.rows ?? [];
  const at = rows.findIndex((row) => String(row.id) === String(id));
  const move = (step) => {
    const next = rows[at < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, at + step))];
    if (next) onPick(next.id);
  };
  const mistake = async () => {
    const found = await ask(address("api/queries/random", { run: place.run, split: queries, name, show: "wrong" }));
    if (found.data) onPick(found.data.id);
  };
  useKeys({ j: () => move(1), k: () => move(-1), x: mistake });
  useEffect(() => {
    if (id === null && rows.length) onPick(rows[0].id, true);
  }, [id, rows.length]);
  const marked = useRef(null);
  useEffect(() => marked.current?.scrollIntoView({ block: "nearest" }), [id, rows.length]);
  return html`<aside class="picker-list" aria-label="Queries">
    <div class="tools">
      ${!isReport && html`<input type="search" placeholder="id, class or text  ( / )" aria-label="Search queries" value=${typed} onInput=${(event) => setTyped(event.target.value)} onKeyDown=${(event) => event.key === "Escape" && event.target.blur()} />`}
      <div class="chips" role="group" aria-label="Which queries">${FILTERS.map(([key, label, what]) => html`<button class=${show === key ? "on" : ""} title=${what} onClick=${() => keep({ show: key === "all" ? "" : key })}>${label}${list.data ? html` <span class="n">${count(key === "all" ? list.data.total : list.data[key])}</span>` : ""}</button>`)}
        ${!isReport && html`<button onClick=${mistake} disabled=${list.data && !list.data.wrong} title="A query that the model gets wrong, by chance (x)">random mistake</button>`}</div>
      ${list.data?.note && html`<p class="muted">${list.data.note}</p>`}
    </div>
    ${list.problem || list.working ? html`<${Waiting} answer=${list} />` : ""}
    <ol>${rows.map((row) => html`<li key=${row.id} ref=${String(row.id) === String(id) ? marked : null}><button class=${`query ${String(row.id) === String(id) ? "on" : ""}`} onClick=${() => onPick(row.id)}>
      ${row.shown?.image ? html`<img src=${row.shown.image} alt="" />` : ""}
      <span class="what"><span class="n id">${row.id}</span> <b>${labelled(row.label, row.label_name)}</b>${row.predicted !== null && row.predicted !== row.label ? html`<span class="minus-ink" title="the model says"> \u2260 ${labelled(row.predicted, row.predicted_name)}</span>` : ""}
        ${!row.shown?.image && row.shown?.text ? html`<span class="snippet">${row.shown.text}</span>` : ""}</span>
      ${row.probability !== null && html`<span class="n p" title="What the model gives to the label.">${percent(row.probability, 0)}</span>`}</button></li>`)}
    </ol>
    ${list.data && list.data.matching > rows.length && more < 120 && !isReport ? html`<button class="quiet more" onClick=${() => setMore(Math.min(120, more + 40))}>more (${count(list.data.matching - rows.length)})</button>` : ""}
    ${list.data && !rows.length ? html`<p class="muted pad">${search ? "No query is like that." : show === "wrong" ? "The model gets none of them wrong." : "None."}</p>` : ""}
  </aside>`;
}

function QueryHead({ view, place, onLabel }) {
  const { query, probabilities, classes, explained } = view;
  const wrong = query.predicted !== null && query.label !== query.predicted;
  const order = (probabilities ?? []).map((value, at) => [value, at]).sort((a, b) => b[0] - a[0]).slice(0, 5);
  return html`<header class="query-head">
    ${hasLook(query) && html`<${Shown} shown=${query.shown} size="large" />`}
    <div class="said">
      <h1><span class="muted">${view.queries}</span> ${query.id}</h1>
      <p class="facts"><span>label <b>${labelled(query.label, query.label_name)}</b></span>
        ${query.predicted !== null && html`<span>model says <b class=${wrong ? "minus-ink" : "plus-ink"}>${labelled(query.predicted, query.predicted_name)}</b> ${wrong ? "\u2717 wrong" : "\u2713 right"}</span>`}
        ${query.probability !== null && html`<span><${Def} is="The probability that the model gives to the label, at the last checkpoint.">p(label)</${Def}> <b class="n">${percent(query.probability)}</b></span>`}
        ${query.loss !== null && html`<span><${Def} is="The loss of this query at the last checkpoint, in nats.">loss</${Def}> <b class="n">${number(query.loss)}</b></span>`}</p>
      ${order.length > 0 && html`<table class="bars"><tbody>${order.map(([value, at]) => html`<tr><th>${classes?.[at] ?? at}</th><td><span class="bar"><i style=${{ width: `${100 * value}%` }}></i></span></td><td class="n">${percent(value)}</td></tr>`)}</tbody></table>`}
      ${explained.length > 1
        ? html`<p class="chips"><${Def} is="Which label is explained: captures of the same query with another label are other questions.">explain</${Def}> ${explained.map((one) => html`<button class=${one.queries === view.queries ? "on" : ""} onClick=${() => onLabel(one.queries)}>${labelled(one.label, one.label_name)}</button>`)}</p>`
        : html`<p class="muted small"><${Def} is=${`The store holds this query with one label. To ask about another, capture the queries with it: gk.capture(store, model, loader, task=task, split="${view.queries}-as-3")`}>explains label ${labelled(query.label, query.label_name)}</${Def}></p>`}
    </div>
  </header>`;
}

function Scored({ one, side, most, tokens }) {
  const width = `${Math.max(1, (100 * Math.abs(one.share)) / Math.max(1e-12, most))}%`;
  const { shown } = one.row;
  const words = shown && (shown.text || shown.problem || (shown.table ?? []).length > 0);
  return html`<li class=${`scored ${side}`}>
    ${shown?.image && html`<img src=${shown.image} alt="" />`}
    <div class="body"><div class="scoreline"><span class="n share" title=${`score ${number(one.score)}, as the method computes it`}>${signed(one.share)}</span><span class="bar"><i style=${{ width }}></i></span></div>
      <div class="meta"><span class="n id">#${one.row.id}</span> <${Label} row=${one.row} />${one.decision && html` <span class="badge" title="A person decided about this label.">${one.decision === "relabel" ? "label wrong" : "label right"}</span>`}</div>
      ${words ? html`<${Shown} shown=${{ ...shown, image: null }} tokens=${tokens} />` : tokens && html`<${Tokens} parts=${tokens} />`}</div>
  </li>`;
}

function HowSure({ answer }) {
  return html`<p class="facts sure">
    ${answer.confidence !== null && html`<span><${Def} is="From 0 to 1: how much these scores would agree with those of as many other checkpoints. Below 0.5 the ranking is mostly chance.">agreement of checkpoints</${Def}> <b class="n">${fixed(answer.confidence, 2)}</b><span class="meter" aria-hidden="true"><i style=${{ width: `${100 * Math.max(0, answer.confidence)}%` }}></i></span></span>`}
    ${answer.judged
      ? html`<span><${Def} is=${`The linear datamodeling score: how well summed scores rank what retrained models do. ${answer.judged.sizes}, ${answer.judged.truth}.`}>LDS</${Def}> <b class="n">${fixed(answer.judged.value)}</b> <span class="n muted">[${fixed(answer.judged.low)}, ${fixed(answer.judged.high)}]</span>${answer.judged.ceiling !== null ? html` <span class="muted">ceiling <span class="n">${fixed(answer.judged.ceiling)}</span></span>` : ""}</span>`
      : html`<span class="muted"><${Def} is="Nobody asked yet whether this method predicts retraining here: gradkeep evaluate lds STORE">not evaluated</${Def}></span>`}
    <span class="muted">${answer.exact ? html`<${Def} is=${answer.scale}>exact</${Def}>` : html`<${Def} is=${answer.approximate ?? answer.scale}>approximate</${Def}>`}, <span class="n">${count(answer.rows)}</span> rows${answer.checkpoints.length > 1 ? html` \u00d7 <span title=${answer.checkpoints.join(", ")}>${answer.checkpoints.length} checkpoints</span>` : answer.checkpoints.length ? html` at ${answer.checkpoints[0]}` : ""}</span>
  </p>`;
}

function Layers({ asked, answer }) {
  const found = useAnswer("api/why/layers", { ...asked, source: answer.source.id });
  if (!found.data) return html`<${Waiting} answer=${found} />`;
  const { layers, shares, rows, parts } = found.data;
  const most = Math.max(1e-12, ...shares);
  const reach = Math.max(1e-30, ...parts.flat().map(Math.abs));
  return html`<div class="pair"><table class="bars"><caption>share of all absolute parts</caption><tbody>${layers.map((name, at) => html`<tr><th>${name}</th><td><span class="bar"><i style=${{ width: `${(100 * shares[at]) / most}%` }}></i></span></td><td class="n">${percent(shares[at])}</td></tr>`)}</tbody></table>
    <div class="scroll"><table class="heat"><caption>parts of single rows; they add up to the score</caption><thead><tr><th>row</th>${layers.map((name) => html`<th class="r">${name}</th>`)}</tr></thead><tbody>${rows.map((row, at) => html`<tr><th class="n">#${row}</th>${parts[at].map((value) => html`<td class=${`n r ${value < 0 ? "minus" : "plus"} d${Math.min(4, Math.ceil((4 * Math.abs(value)) / reach))}`}>${value < 0 ? "\u2212" : "+"}${number(Math.abs(value), 2)}</td>`)}</tr>`)}</tbody></table></div></div>`;
}

function Groups({ asked, answer }) {
  const { k, ...rest } = asked;
  const found = useAnswer("api/why/groups", { ...rest, source: answer.source.id });
  if (!found.data) return html`<${Waiting} answer=${found} />`;
  if (!found.data.groups.length) return html`<p class="muted">The strongest rows have nothing in common: no group stands out.</p>`;
  return html`<ul class="groups">${found.data.groups.map((one) => html`<li class=${one.helps ? "plus" : "minus"}><b class="n">${one.helps ? "+" : "\u2212"}${percent(one.share, 0)}</b> <span><${Def} is=${`Of all that ${one.helps ? "helped" : "hurt"} what these rows did. Clustered by the cosines of their gradients.`}>${count(one.size)} rows</${Def}>: ${one.name}</span>
    <span class="thumbs">${one.rows.map((row) => (row.shown?.image ? html`<img src=${row.shown.image} alt=${`row ${row.id}`} title=${`#${row.id}, label ${labelled(row.label, row.label_name)}`} />` : html`<span class="n chip" title=${row.shown?.text ?? ""}>#${row.id}</span>`))}</span></li>`)}</ul>
    <p class="muted small">${count(found.data.rest)} strong rows are in none of these groups.</p>`;
}

function Answer({ answer, asked, sources, onSource, onClose, alone, place }) {
  const tab = place.params.tab ?? "";
  const [tokens, setTokens] = useState(null);
  const rows = [...answer.helped, ...answer.hurt];
  const most = Math.max(0, ...rows.map((one) => Math.abs(one.share)));
  const turn = (name) => go({ ...place, params: { ...place.params, tab: tab === name ? "" : name } }, { replace: true });
  const tell = async () => {
    if (tokens) return setTokens(null);
    const { k, ...rest } = asked;
    const url = address("api/why/tokens", { ...rest, row: rows.slice(0, 30).map((one) => one.row.id) });
    setTokens({ working: true });
    for (;;) {
      const found = await ask(url);
      if (found.working) {
        await new Promise((done) => setTimeout(done, 300));
        continue;
      }
      return setTokens(found.data ? { of: Object.fromEntries(found.data.rows.map((one) => [one.row, one])) } : { problem: found.problem });
    }
  };
  useEffect(() => setTokens(null), [asked.query, answer.source?.id]);
  const kinds = { saved: "saved scores", fit: "datamodels", study: "datamodels", method: "methods" };
  return html`<section class="panel answer" aria-label=${answer.source?.id}>
    <div class="answer-head"><select aria-label="Method" value=${answer.source?.id} onChange=${(event) => onSource(event.target.value)} title=${answer.source?.note} disabled=${isReport}>
        ${Object.keys(kinds).map((kind) => {
          const some = sources.filter((one) => one.kind === kind);
          return some.length ? html`<optgroup label=${kinds[kind]}>${some.map((one) => html`<option value=${one.id} selected=${one.id === answer.source?.id}>${one.kind === "saved" ? `${one.name} (${one.method})` : one.name}</option>`)}</optgroup>` : "";
        })}</select>
      ${onClose && html`<button class="quiet" onClick=${onClose} title="Take this method away">\u00d7</button>`}
      ${answer.shape && html`<span class="spread"><${Histogram} counts=${answer.shape.counts} low=${answer.shape.low} high=${answer.shape.high} title=${`how the scores of all rows are spread, from ${number(answer.shape.low)} to ${number(answer.shape.high)}; heights are logarithmic`} /></span>`}
    </div>
    ${answer.problem ? html`<${Problem} problem=${answer.problem} />` : ""}
    ${answer.working ? html`<${Working} working=${answer} />` : ""}
    ${!answer.problem && !answer.working
      ? html`<${HowSure} answer=${answer} />
        ${answer.foreign > 0 && html`<p class="notice" role="alert">${answer.foreign} of these rows are not in the capture: the scores are of another one.</p>`}
        <div class=${alone ? "sides pair" : "sides"}>
          <div><h3 class="plus-ink">+ helped most</h3><ol class="scores">${answer.helped.map((one) => html`<${Scored} one=${one} side="plus" most=${most} tokens=${tokens?.of?.[one.row.id]} key=${one.row.id} />`)}</ol>${!answer.helped.length && html`<p class="muted">No row helped.</p>`}</div>
          <div><h3 class="minus-ink">\u2212 hurt most</h3><ol class="scores">${answer.hurt.map((one) => html`<${Scored} one=${one} side="minus" most=${most} tokens=${tokens?.of?.[one.row.id]} key=${one.row.id} />`)}</ol>${!answer.hurt.length && html`<p class="muted">No row hurt.</p>`}</div>
        </div>
        <div class="tabs" role="group" aria-label="More">
          <button class=${tab === "groups" ? "on" : ""} onClick=${() => turn("groups")} title="Groups of rows that act alike, by their gradients">groups</button>
          ${answer.source.layered && html`<button class=${tab === "layers" ? "on" : ""} onClick=${() => turn("layers")} title="What each layer adds to the scores">layers</button>`}
          ${!isReport && html`<button class=${tokens ? "on" : ""} onClick=${tell} title="What each token of these rows carries, where the capture knows tokens">tokens</button>`}
        </div>
        ${tokens?.problem && html`<${Problem} problem=${tokens.problem} />`}
        ${tab === "groups" && html`<${Groups} asked=${asked} answer=${answer} />`}
        ${tab === "layers" && answer.source.layered && html`<${Layers} asked=${asked} answer=${answer} />`}`
      : ""}
  </section>`;
}

export function Why({ place, run }) {
  const { params } = place;
  const queries = params.queries ?? run?.queries;
  const train = params.train ?? run?.train ?? "train";
  const name = params.name ?? run?.captures[0] ?? "main";
  const k = Math.max(1, Math.min(50, Number(params.k) || 8));
  const id = place.id;
  const sources = useAnswer("api/sources").data ?? [];
  const chosen = [params.source, params.vs].filter(Boolean);
  const asked = useMemo(() => ({ run: place.run, queries, train, name, query: id, k }), [place.run, queries, train, name, id, k]);
  const valid = id !== null && /^-?\d{1,18}$/.test(id);
  const why = useAnswer(valid && queries ? "api/why" : null, { ...asked, source: chosen }, { refresh: (data) => (data.answers.some((one) => one.working) ? 350 : null) });
  const keep = (more, options) => go({ ...place, params: { ...params, ...more } }, options);
  const pick = (next, replace = false) => go({ ...place, id: String(next) }, { replace });
  useKeys({ "+": () => keep({ k: k + 1 }, { replace: true }), "-": () => keep({ k: Math.max(1, k - 1) }, { replace: true }) });
  if (!run) return html`<h1>Why this prediction</h1><${Empty} title="There is no such run" command="gradkeep capture CONFIG">Capture training rows and queries at the same checkpoint.</${Empty}>`;
  if (!queries)
    return html`<h1>Why this prediction</h1><${Empty} title="No queries were captured" command="gradkeep capture CONFIG">A question needs rows that it is about: <code>gk.capture(store, model, test_loader, task=task, split="test")</code>, at the checkpoint of the training rows.</${Empty}>`;
  const view = why.data;
  const first = view?.answers[0]?.source?.id;
  const setSource = (at, value) => keep(at === 0 ? { source: value } : { source: params.source ?? first, vs: value });
  const other = sources.find((one) => one.id !== first && one.kind === "method")?.id;
  return html`<div class="why">
    <${Picker} place=${place} queries=${queries} name=${name} id=${id} onPick=${pick} />
    <div class="explained">
      ${!valid && id !== null ? html`<${Problem} problem=${{ what: `${id} is no id of a row`, expected: "a whole number" }} />` : ""}
      ${why.problem || (!view && valid) ? html`<${Waiting} answer=${why} />` : ""}
      ${view && !why.problem
        ? html`<${QueryHead} view=${view} place=${place} onLabel=${(split) => keep({ queries: split })} />
          <div class="tools row">${!isReport && html`<label class="slider"><${Def} is="Rows shown on each side (+ and -).">rows</${Def}> <input type="range" min="1" max="30" value=${k} aria-label="Rows on each side" onInput=${(event) => keep({ k: event.target.value }, { replace: true })} /> <output class="n">${k}</output></label>
            ${view.answers.length < 2 && other && html`<button onClick=${() => keep({ source: params.source ?? first, vs: other })} title="Set a second method beside this one">+ compare</button>`}`}
            <span class="muted small">scores as <${Def} is="A row's score by the sum of all absolute scores of the query. Raw scores of different methods are on different scales; point at a share to see them.">shares of all influence</${Def}>; positive helped, negative hurt</span></div>
          <div class=${view.answers.length > 1 ? "pair answers" : "answers"}>${view.answers.map((answer, at) => html`<${Answer} key=${at} answer=${answer} asked=${asked} sources=${sources} alone=${view.answers.length === 1} place=${place}
            onSource=${(value) => setSource(at, value)} onClose=${view.answers.length > 1 && !isReport ? () => keep(at === 0 ? { source: params.vs, vs: "" } : { vs: "" }) : null} />`)}</div>`
        : ""}
    </div>
  </div>`;
}
