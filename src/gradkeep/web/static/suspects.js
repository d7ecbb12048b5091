// Suspect labels: a queue to go through by keys; every decision is kept in the store's log.
import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { address, isReport, send, useAnswer } from "./api.js";
import { count, fixed, labelled, number, percent } from "./format.js";
import { Command, Def, Empty, Key, Problem, Shown, Waiting, Whisker, Working, hasLook } from "./parts.js";
import { go, useKeys } from "./route.js";

const MEASURES = {
  loss: ["mean loss", "The mean loss over the checkpoints, in nats: the measure that others have to beat."],
  self: ["gradient length", "The squared length of the row's own gradient, summed over the checkpoints."],
  noise: ["P(wrong)", "The probability that the label is wrong, from the probabilities of all classes."],
};

function said(decision) {
  if (!decision) return null;
  if (decision.action === "accept") return "right";
  return decision.label === null ? "wrong" : `\u2192 ${decision.label}`;
}

function Queue({ rows, at, onPick, by }) {
  const marked = useRef(null);
  useEffect(() => marked.current?.scrollIntoView({ block: "nearest" }), [at, rows.length]);
  return html`<ol class="queue">${rows.map((one, place) => html`<li key=${one.row.id} ref=${place === at ? marked : null}><button class=${`query ${place === at ? "on" : ""} ${one.decision ? "decided" : ""}`} onClick=${() => onPick(one)}>
    <span class="n rank">${one.rank}</span>${one.row.shown?.image ? html`<img src=${one.row.shown.image} alt="" />` : ""}
    <span class="what"><span class="n id">${one.row.id}</span> <b>${labelled(one.row.label, one.row.label_name)}</b>${one.row.predicted !== null && one.row.predicted !== one.row.label ? html`<span class="minus-ink" title="the model says"> \u2260 ${labelled(one.row.predicted, one.row.predicted_name)}</span>` : ""}${!one.row.shown?.image && one.row.shown?.text ? html`<span class="snippet">${one.row.shown.text}</span>` : ""}</span>
    ${one.decision ? html`<span class="badge">${said(one.decision)}</span>` : html`<span class="n p" title=${MEASURES[by][1]}>${number(one.value)}</span>`}</button></li>`)}</ol>`;
}

// What was begun is about the decisions of then: after the next one, or while it is on its way, it is not asked for.
function Retrain({ view, session, capture, deciding, settled }) {
  const [at, setAt] = useState(null);
  const begun = at === deciding.version && !deciding.under;
  const found = useAnswer(begun ? "api/suspects/retrained" : null, capture, { version: at });
  const begin = async () => {
    const version = await settled.current;
    await send("api/suspects/retrained", capture);
    setAt(version);
  };
  if (isReport) return null;
  const gain = found.data?.gain;
  const reach = gain ? Math.max(Math.abs(gain.low), Math.abs(gain.high), 1e-9) * 1.15 : 1;
  return html`<section class="panel">
    <h3>Without them</h3>
    ${view.recipe
      ? html`<p>Train without the ${count(view.relabelled)} rows whose labels are wrong, and without as many at random. <button onClick=${begin} disabled=${!view.relabelled || deciding.under || (begun && !found.data && !found.problem)}>retrain</button></p>
        ${begun && !found.data ? html`<${Waiting} answer=${found} />` : ""}
        ${gain && html`<p class="verdict"><b class=${gain.value < 0 ? "minus-ink n" : "plus-ink n"}>${gain.value < 0 ? "\u2212" : "+"}${fixed(Math.abs(gain.value))}</b> <span class="n muted">[${fixed(gain.low)}, ${fixed(gain.high)}]</span> <${Def} is="How much larger the queries' margins are after training without these rows than after training without as many random ones, with its 95% interval. Positive: queries are answered better.">gain over random rows</${Def}>; ${gain.sizes}</p><${Whisker} low=${gain.low} high=${gain.high} value=${gain.value} from=${-reach} to=${reach} />`}`
      : html`<p class="muted">To train without these rows and see the difference, say how models are trained:</p><${Command} line=${`gradkeep serve ${session?.location ?? "STORE"} --recipe train.py:recipe`} />`}
  </section>`;
}

function Suggestions({ view, session, capture, onThere }) {
  const [begun, setBegun] = useState(view.suggestions === "working");
  const found = useAnswer(begun ? "api/suspects/suggestions" : null, { split: capture.split });
  useEffect(() => {
    if (found.data) onThere();
  }, [Boolean(found.data)]);
  if (view.suggestions === "there" || isReport) return null;
  if (!view.recipe)
    return html`<p class="muted small">Suggestions come from models that never saw the row, not from this model: <code>gradkeep serve ${session?.location ?? "STORE"} --recipe train.py:recipe</code></p>`;
  if (begun) return html`<${Waiting} answer=${found} />`;
  const begin = async () => {
    await send("api/suspects/suggestions", { run: capture.run, split: capture.split, name: capture.name });
    setBegun(true);
  };
  return html`<p class="small"><button onClick=${begin} title="Five trainings that leave each row out in turn; kept in the store">ask models that never saw the rows</button></p>`;
}

export function Suspects({ place, run, session }) {
  const { params } = place;
  const split = params.split ?? run?.train ?? "train";
  const name = params.name ?? run?.captures[0] ?? "main";
  const by = MEASURES[params.by] ? params.by : "loss";
  const show = params.show ?? "all";
  const [version, setVersion] = useState(0);
  const [deciding, setDeciding] = useState({ version: 0, under: false });
  const settled = useRef(Promise.resolve(0)); // the number of decisions, once the last one is kept
  const [size, setSize] = useState(40);
  const [choosing, setChoosing] = useState(false);
  const [problem, setProblem] = useState(null);
  const capture = { run: place.run, split, name };
  const answer = useAnswer(run ? "api/suspects" : null, { ...capture, by, show, count: size }, { version });
  const view = answer.data;
  const rows = view?.rows ?? [];
  const found = rows.findIndex((one) => String(one.row.id) === String(place.id));
  const at = found < 0 ? 0 : found;
  const current = rows[at] ?? null;
  const history = useRef([]);
  const pick = (one) => one && go({ ...place, id: String(one.row.id) }, { replace: true });
  const move = (step) => pick(rows[Math.max(0, Math.min(rows.length - 1, at + step))]);
  const keep = (more) => go({ ...place, id: null, params: { ...params, ...more } });
  const decide = (row, action, label = null) => {
    const number = deciding.version + 1;
    setDeciding({ version: number, under: true });
    settled.current = settled.current
      .then(() => decideNext(row, action, label))
      .then(() => (setDeciding({ version: number, under: false }), number));
  };
  const decideNext = async (row, action, label) => {
    const told = await send("api/decisions", { ...capture, row: row.row.id, action, label });
    setChoosing(false);
    setProblem(told.problem ?? null);
    if (!told.data) return;
    if (action === "undo") history.current = history.current.filter((id) => id !== row.row.id);
    else history.current.push(row.row.id);
    const next = rows[at + 1];
    setVersion((old) => old + 1);
    if (action !== "undo" && next) pick(next);
  };
  const accept = () => current && !isReport && decide(current, "accept");
  const relabel = () => current && !isReport && setChoosing(true);
  const undo = () => {
    if (isReport) return;
    const target = current?.decision ? current : rows.find((one) => one.row.id === history.current[history.current.length - 1]) ?? rows.filter((one) => one.decision).sort((a, b) => b.decision.number - a.decision.number)[0];
    if (target) decide(target, "undo");
  };
  const best = current?.suggestion?.label ?? null;
  const keys = { j: () => move(1), k: () => move(-1), a: accept, r: relabel, u: undo, Escape: () => setChoosing(false) };
  if (choosing) {
    (view?.labels ?? []).forEach((label) => label >= 0 && label < 10 && (keys[String(label)] = () => decide(current, "relabel", label)));
    keys.Enter = () => decide(current, "relabel", best);
    keys.w = () => decide(current, "relabel", null);
  }
  useKeys(keys);
  if (!run) return html`<h1>Suspect labels</h1><${Empty} title="There is no such run" command="gradkeep capture CONFIG">Capture the training rows; <code>keep: losses</code> is enough.</${Empty}>`;
  const decided = view ? view.accepted + view.relabelled : 0;
  const about = view?.documents ? [view.by === "self" ? "gradient length per token" : "excess loss per token", view.measure] : MEASURES[by];
  return html`<header class="split-head"><h1>${view?.documents ? "Unusual documents" : "Suspect labels"}</h1>
      <div class="tools row"><label>by <select aria-label="Measure" value=${by} title=${about[1]} disabled=${isReport} onChange=${(event) => keep({ by: event.target.value })}>${Object.entries(MEASURES).map(([key, [label]]) => html`<option value=${key} selected=${key === by}>${label}</option>`)}</select></label>
        ${!isReport && html`<span class="chips" role="group" aria-label="Which rows">${["all", "open", "decided"].map((one) => html`<button class=${show === one ? "on" : ""} onClick=${() => keep({ show: one === "all" ? "" : one })}>${one}</button>`)}</span>`}
        ${!isReport && html`<span class="export">export <a href=${address("api/decisions/export", { split, form: "csv" })} download>CSV</a> <a href=${address("api/decisions/export", { split, form: "json" })} download>JSON</a></span>`}</div></header>
    ${view && html`<p class="facts"><span><b class="n">${count(decided)}</b> decided of <span class="n">${count(view.total)}</span></span><span><b class="n">${count(view.accepted)}</b> right</span><span><b class="n">${count(view.relabelled)}</b> wrong</span>
      ${view.noise ? html`<span><${Def} is="The expected share of wrong labels, with its interval; of rows that the model was trained on it is a lower end.">wrong labels</${Def}> <b class="n">${percent(view.noise.rate)}</b> <span class="muted n">[${percent(view.noise.low)}, ${percent(view.noise.high)}]</span></span><span><${Def} is=${`The longest list, by P(wrong), of which ${percent(view.noise.precision, 0)} are expected to be wrong.`}>worth a look</${Def}> <b class="n">${count(view.noise.listed)}</b> rows</span>` : html`<span class="muted"><${Def} is='How many labels are wrong can be said where the probabilities of all classes are kept: gk.capture(..., keep="losses")'>share of wrong labels unknown</${Def}></span>`}
      <span class="muted" title=${view.checkpoints.join(", ")}>${view.checkpoints.length} checkpoint${view.checkpoints.length === 1 ? "" : "s"}</span></p>`}
    ${answer.problem || (!view && !answer.problem) ? html`<${Waiting} answer=${answer} />` : ""}
    ${view && !answer.problem
      ? rows.length
        ? html`<div class="suspects"><div class="picker-list"><${Queue} rows=${rows} at=${at} onPick=${pick} by=${by} />${view.matching > rows.length && size < 120 && !isReport && html`<button class="quiet more" onClick=${() => setSize(Math.min(120, size + 40))}>more (${count(view.matching - rows.length)})</button>`}</div>
          <div class="explained">${current && html`<section class="panel current" aria-live="polite">
              <div class="current-head">${hasLook(current.row) ? html`<${Shown} shown=${current.row.shown} size="huge" />` : html`<p class="muted">No preview: <code>gradkeep serve STORE --data data.py:preview</code> shows images, texts or tables.</p>`}
                <div><h2><span class="muted">${split}</span> ${current.row.id} <span class="muted small">rank ${count(current.rank)}</span></h2>
                  <p class="big">label <b>${labelled(current.row.label, current.row.label_name)}</b></p>
                  <p class="facts">${current.row.predicted !== null && html`<span><${Def} is="What this model says most often; it was trained on the row, so this is no evidence by itself.">model says</${Def}> <b>${labelled(current.row.predicted, current.row.predicted_name)}</b></span>`}
                    <span><${Def} is=${about[1]}>${about[0]}</${Def}> <b class="n">${number(current.value)}</b></span>
                    ${current.wrong !== null && html`<span><${Def} is=${MEASURES.noise[1]}>P(wrong)</${Def}> <b class="n">${percent(current.wrong)}</b></span>`}
                    ${current.suggestion && html`<span><${Def} is="What models say that were not trained on this row.">suggestion</${Def}> <b>${labelled(current.suggestion.label, current.suggestion.name)}</b> <span class="n muted">${percent(current.suggestion.probability)}</span></span>`}</p>
                  ${current.decision && html`<p><span class="badge">${current.decision.action === "accept" ? "label is right" : current.decision.label === null ? "label is wrong" : `label is wrong, should be ${labelled(current.decision.label, view.classes?.[current.decision.label])}`}</span></p>`}
                  ${!isReport && html`<div class="acts"><button onClick=${accept}>right <${Key}>a</${Key}></button><button onClick=${relabel} class=${choosing ? "on" : ""}>wrong <${Key}>r</${Key}></button><button onClick=${undo} disabled=${!decided}>undo <${Key}>u</${Key}></button><span class="muted small"><${Key}>j</${Key}> <${Key}>k</${Key}> next, previous</span></div>`}
                  ${choosing && html`<div class="chooser" role="group" aria-label="The right label"><span>should be</span>${view.labels.slice(0, 40).map((label) => html`<button class=${label === best ? "best" : ""} onClick=${() => decide(current, "relabel", label)}>${labelled(label, view.classes?.[label])}${label < 10 && label >= 0 && String(label) !== labelled(label, view.classes?.[label]) ? html` <${Key}>${label}</${Key}>` : ""}</button>`)}<button onClick=${() => decide(current, "relabel", best)}>${best === null ? "unknown" : "the suggestion"} <${Key}>Enter</${Key}></button></div>`}
                  ${problem && html`<${Problem} problem=${problem} />`}</div></div>
              <${Suggestions} view=${view} session=${session} capture=${capture} onThere=${() => setVersion((old) => old + 1)} /></section>`}
            <${Retrain} view=${view} session=${session} capture=${capture} deciding=${deciding} settled=${settled} /></div></div>`
        : html`<${Empty} title=${show === "decided" ? "Nothing is decided yet" : show === "open" ? "Everything is decided" : "No rows"}>Go through the queue with <${Key}>j</${Key}> and <${Key}>k</${Key}>; <${Key}>a</${Key}> says that a label is right, <${Key}>r</${Key}> that it is wrong, <${Key}>u</${Key}> takes it back.</${Empty}>`
      : ""}`;
}
