// The frame: the rail on the left, one screen on the right, keys that go from one to the other.
import { html, render, useEffect, useErrorBoundary, useRef, useState } from "./vendor/preact.js";
import { isReport, useAnswer } from "./api.js";
import { SCREENS, go, link, usePlace } from "./route.js";
import { Key, Problem, Waiting } from "./parts.js";
import { Runs } from "./runs.js";
import { Why } from "./why.js";
import { Suspects } from "./suspects.js";
import { Clusters } from "./clusters.js";
import { Memory } from "./memory.js";
import { Evaluation } from "./evaluation.js";
import { Store } from "./store.js";

const VIEWS = { runs: Runs, why: Why, suspects: Suspects, clusters: Clusters, memory: Memory, evaluation: Evaluation, store: Store };

function Rail({ place, runs, session, onHelp }) {
  useEffect(() => document.querySelector(".rail a[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" }), [place.screen]);
  const name = (session?.location ?? "").replace(/\/+$/, "").split("/").pop();
  return html`<nav class="rail" aria-label="Screens">
    <div class="brand"><b>gradkeep</b><span class="muted" title=${session?.location}>${name}</span></div>
    ${runs.length > 1 &&
    html`<label class="picker"><span>run</span>
      <select aria-label="Run" value=${place.run} onChange=${(event) => go({ run: event.target.value, screen: place.screen })}>
        ${runs.map((one) => html`<option value=${one.name} selected=${one.name === place.run}>${one.name}</option>`)}
      </select></label>`}
    <ul>${SCREENS.map((one) => html`<li key=${one.id}><a href=${link({ run: place.run, screen: one.id })} aria-current=${place.screen === one.id ? "page" : undefined}><span>${one.name}</span><kbd>g ${one.key}</kbd></a></li>`)}</ul>
    <div class="foot">${isReport ? html`<span class="muted">a report; <code>gradkeep serve</code> answers more</span>` : html`<button class="quiet" onClick=${onHelp}>keys <${Key}>?</${Key}></button>`}<span class="muted">${session ? `v${session.version}` : ""}</span></div>
  </nav>`;
}

const HELP = [
  ["g then r w s c m e t", "go to a screen"],
  ["j / k", "next, previous row or query"],
  ["/", "search"],
  ["x", "a random mistake (why)"],
  ["a", "the label is right (suspects)"],
  ["r", "the label is wrong (suspects); then a class, or Enter for the suggestion"],
  ["u", "undo the last decision (suspects)"],
  ["+ / -", "more, fewer rows (why)"],
  ["Esc", "close, clear"],
];

function Help({ onClose }) {
  const box = useRef(null);
  useEffect(() => box.current.focus(), []);
  return html`<div class="veil" onClick=${onClose}><div class="help" role="dialog" aria-label="Keys" tabindex="-1" ref=${box} onClick=${(event) => event.stopPropagation()}>
    <h2>Keys</h2><table><tbody>${HELP.map(([keys, what]) => html`<tr><th><kbd>${keys}</kbd></th><td>${what}</td></tr>`)}</tbody></table>
    <button onClick=${onClose}>close</button></div></div>`;
}

function Screen({ place, run, runs, session }) {
  const [broken, reset] = useErrorBoundary((error) => console.error(error));
  useEffect(() => reset(), [place.screen, place.id]);
  if (broken) return html`<${Problem} problem=${{ what: "this screen cannot be drawn", found: String(broken) }} />`;
  const View = VIEWS[place.screen];
  return html`<${View} place=${place} run=${run} runs=${runs} session=${session} />`;
}

function App() {
  const place = usePlace();
  const [help, setHelp] = useState(false);
  const session = useAnswer("api/session").data;
  const runsAnswer = useAnswer("api/runs", {}, { refresh: (data) => (data.runs.some((one) => one.unfinished) ? 3000 : null) });
  const runs = runsAnswer.data?.runs ?? [];
  const usual = (runs.find((one) => one.name === "main") ?? runs[0])?.name ?? "main";
  const shown = { ...place, run: place.run ?? usual };
  const run = runs.find((one) => one.name === shown.run) ?? null;
  const waiting = useRef(false);
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      if (waiting.current) {
        waiting.current = false;
        const screen = SCREENS.find((one) => one.key === event.key);
        if (screen) {
          event.preventDefault();
          event.stopImmediatePropagation();
          go({ run: shown.run, screen: screen.id });
        }
        return;
      }
      if (event.key === "g") {
        waiting.current = true;
        setTimeout(() => (waiting.current = false), 1200);
      } else if (event.key === "?") setHelp(true);
      else if (event.key === "Escape") setHelp(false);
      else if (event.key === "/") {
        const field = document.querySelector("input[type=search]");
        if (field) {
          event.preventDefault();
          field.focus();
        }
      }
    };
    window.addEventListener("keydown", pressed, true);
    return () => window.removeEventListener("keydown", pressed, true);
  }, [shown.run]);
  useEffect(() => {
    document.title = `${SCREENS.find((one) => one.id === place.screen).name} \u00b7 gradkeep`;
  }, [place.screen]);
  const needsRun = !["store", "memory", "evaluation"].includes(place.screen);
  return html`<${Rail} place=${shown} runs=${runs} session=${session} onHelp=${() => setHelp(true)} />
    <main id="main" class=${`screen-${place.screen}`}>
      ${needsRun && !runsAnswer.data ? html`<${Waiting} answer=${runsAnswer} />` : html`<${Screen} place=${shown} run=${run} runs=${runs} session=${session} key=${place.screen} />`}
    </main>
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}`;
}

render(html`<${App} />`, document.body);
