// What several screens are made of.
import { html, useState } from "./vendor/preact.js";
import { bytes, labelled, number, percent } from "./format.js";

// A word with its definition, shown when one points at it.
export function Def({ is, children }) {
  return html`<abbr class="def" title=${is}>${children}</abbr>`;
}

export function Command({ line }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(line);
      setCopied(true);
      setTimeout(() => setCopied(false), 1200);
    } catch {
      setCopied(false);
    }
  };
  return html`<span class="command"><code>${line}</code><button class="quiet" onClick=${copy} title="Copy the command">${copied ? "copied" : "copy"}</button></span>`;
}

export function Empty({ title, children, command }) {
  const lines = Array.isArray(command) ? command : command ? [command] : [];
  return html`<div class="empty"><h3>${title}</h3><p>${children}</p>${lines.map((line) => html`<${Command} line=${line} key=${line} />`)}</div>`;
}

export function Problem({ problem }) {
  return html`<div class="problem" role="alert">
    <strong>${problem.what}</strong>
    <dl>
      ${problem.path && html`<dt>where</dt><dd>${problem.path}</dd>`}
      ${problem.found && html`<dt>found</dt><dd>${problem.found}</dd>`}
      ${problem.expected && html`<dt>expected</dt><dd>${problem.expected}</dd>`}
      ${problem.fix && html`<dt>next</dt><dd><code>${problem.fix}</code></dd>`}
    </dl>
  </div>`;
}

export function Working({ working }) {
  const { total, done } = working;
  return html`<div class="working" role="status">
    <span class="pulse"></span>${working.working}${total ? html`<span class="muted"> ${number(done)} of ${number(total)}</span><progress value=${done} max=${total}></progress>` : " ..."}
  </div>`;
}

// What stands in the place of an answer that is not there; nothing once it is.
export function Waiting({ answer }) {
  if (answer.problem) return html`<${Problem} problem=${answer.problem} />`;
  if (answer.working) return html`<${Working} working=${answer.working} />`;
  return html`<div class="working quiet-wait" role="status"><span class="pulse"></span></div>`;
}

export function Key({ children }) {
  return html`<kbd>${children}</kbd>`;
}

// Small bars of how something is spread.
export function Histogram({ counts, low, high, title }) {
  const most = Math.max(1, ...counts.map((one) => Math.log1p(one)));
  const width = 3;
  const zero = low < 0 && high > 0 ? (-low / (high - low)) * counts.length * width : null;
  const bars = counts.map((one, at) => {
    const height = one ? Math.max(1, (Math.log1p(one) / most) * 26) : 0;
    const middle = low + ((at + 0.5) / counts.length) * (high - low);
    return html`<rect x=${at * width} y=${28 - height} width=${width - 0.6} height=${height} class=${middle < 0 ? "minus" : "plus"} />`;
  });
  return html`<svg class="histogram" viewBox="0 0 ${counts.length * width} 28" preserveAspectRatio="none" role="img" aria-label=${title}>
    <title>${title}</title>${bars}
    ${zero !== null && html`<line x1=${zero} x2=${zero} y1="0" y2="28" class="zero" />`}
  </svg>`;
}

// A row as it looks: image, text, tokens, table; what a preview raised stands in its place.
export function Shown({ shown, size = "small", tokens }) {
  if (!shown) return null;
  if (shown.problem) return html`<span class="raised" title="The preview function raised this.">preview: ${shown.problem}</span>`;
  return html`<div class="shown ${size}">
    ${shown.image && html`<img src=${shown.image} alt="" />`}
    ${tokens ? html`<${Tokens} parts=${tokens} text=${shown.text} />` : shown.text && html`<p class="text">${shown.text}</p>`}
    ${shown.table && shown.table.length > 0 && html`<table class="cells"><tbody>${shown.table.slice(0, size === "small" ? 6 : 40).map(([name, value]) => html`<tr key=${name}><th>${name}</th><td>${value}</td></tr>`)}</tbody></table>`}
  </div>`;
}

// Words, each marked by what it carries: a line below for minus, above for plus, and colour.
export function Tokens({ parts, text }) {
  const most = Math.max(1e-30, ...parts.values.map(Math.abs));
  const words = parts.tokens.length ? parts.tokens : parts.values.map((_, at) => `\u00b7${at}`);
  return html`<p class="tokens">${!parts.tokens.length && text ? html`<span class="text">${text}</span>` : ""}${words.map((word, at) => {
    const value = parts.values[at] ?? 0;
    const depth = Math.min(4, Math.ceil((4 * Math.abs(value)) / most - 0.2));
    const side = depth <= 0 ? "" : value < 0 ? `minus d${depth}` : `plus d${depth}`;
    return html`<span class="token ${side}" title="${value < 0 ? "\u2212" : "+"}${number(Math.abs(value))}">${word}</span>`;
  })}</p>`;
}

export function hasLook(row) {
  return row.shown && (row.shown.image || row.shown.text || row.shown.problem || (row.shown.table ?? []).length);
}

export function Label({ row }) {
  if (!row.known) return html`<span class="muted">not in this capture</span>`;
  const wrong = row.predicted !== null && row.label !== null && row.predicted !== row.label;
  return html`<span class="label"><${Def} is="The label that the row was captured with.">label</${Def}> <b>${labelled(row.label, row.label_name)}</b>${
    row.predicted !== null && wrong ? html`<span class="says"> model says <b>${labelled(row.predicted, row.predicted_name)}</b></span>` : ""
  }</span>`;
}

export function Size({ value }) {
  return html`<span class="n" title="${number(value)} bytes">${bytes(value)}</span>`;
}

export function Sure({ value }) {
  return html`<span class="n" title="The probability that the model gives to the row's label.">${percent(value)}</span>`;
}

// A value with its interval on a scale that several of them share.
export function Whisker({ low, high, value, ceiling, from, to }) {
  const place = (x) => (100 * (x - from)) / Math.max(1e-12, to - from);
  return html`<svg class="whisker" viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">
    ${from < 0 && to > 0 && html`<line x1=${place(0)} x2=${place(0)} y1="0" y2="12" class="zero" />`}
    ${low !== null && html`<line x1=${place(low)} x2=${place(high)} y1="6" y2="6" class="interval" />`}
    <rect x=${place(value) - 0.7} y="2" width="1.4" height="8" class="value" />
    ${ceiling !== null && ceiling !== undefined && html`<line x1=${place(ceiling)} x2=${place(ceiling)} y1="1" y2="11" class="ceiling" />`}
  </svg>`;
}
