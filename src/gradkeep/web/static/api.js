// Asking the server, or, in a report, what was written into the file.
import { useEffect, useState } from "./vendor/preact.js";

const inlined = document.getElementById("gradkeep-answers");
const answers = inlined ? JSON.parse(inlined.textContent) : null;
export const isReport = answers !== null;
const token = document.querySelector('meta[name="gradkeep-token"]')?.content ?? "";

// The address of a question; parameters are sorted, so that equal questions have equal addresses.
export function address(path, params = {}) {
  const pairs = [];
  for (const name of Object.keys(params).sort()) {
    const value = params[name];
    if (value === null || value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) pairs.push([name, String(one)]);
  }
  const query = pairs.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  return query ? `${path}?${query}` : path;
}

async function answered(response) {
  let body;
  try {
    body = await response.json();
  } catch {
    return { problem: { kind: "Network", what: `the server answered ${response.status} without an answer` } };
  }
  if (response.status === 202) return { working: body };
  if (!response.ok) return { problem: body.problem ?? { kind: "Refused", what: `refused (${response.status})` } };
  return { data: body };
}

const UNREACHABLE = {
  kind: "Network",
  what: "the server does not answer",
  fix: "start it again: gradkeep serve STORE",
};

export async function ask(url, signal) {
  if (isReport) {
    const data = answers[url];
    if (data !== undefined) return { data };
    return { problem: { kind: "NotInReport", what: "this report does not hold that answer", fix: "gradkeep serve STORE answers it" } };
  }
  try {
    return await answered(await fetch(url, { signal }));
  } catch (error) {
    return signal?.aborted ? {} : { problem: UNREACHABLE };
  }
}

export async function send(path, body) {
  try {
    const headers = { "content-type": "application/json", "x-gradkeep-token": token };
    return await answered(await fetch(path, { method: "POST", headers, body: JSON.stringify(body ?? {}) }));
  } catch {
    return { problem: UNREACHABLE };
  }
}

// An answer that is asked for anew when its address changes, and again while it is worked on.
// `refresh(data)` gives milliseconds after which to look once more, or nothing.
export function useAnswer(path, params, { refresh, version } = {}) {
  const url = path ? address(path, params) : null;
  const [state, setState] = useState({ url: null });
  useEffect(() => {
    if (!url) return undefined;
    const control = new AbortController();
    let timer = null;
    const look = async () => {
      const found = await ask(url, control.signal);
      if (control.signal.aborted) return;
      setState({ url, ...found });
      const again = found.working ? 300 : found.data && refresh ? refresh(found.data) : null;
      if (again && !isReport) timer = setTimeout(look, again);
    };
    look();
    return () => {
      control.abort();
      clearTimeout(timer);
    };
  }, [url, version]);
  if (!url) return {};
  return state.url === url ? state : { data: state.data, stale: true };
}
