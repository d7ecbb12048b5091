// The address is the state: #/run/main/why/113?source=method:kernel&k=8
import { useEffect, useRef, useState } from "./vendor/preact.js";

export const SCREENS = [
  { id: "runs", name: "Runs", key: "r" },
  { id: "why", name: "Why this prediction", key: "w" },
  { id: "suspects", name: "Suspect labels", key: "s" },
  { id: "clusters", name: "Clusters", key: "c" },
  { id: "memory", name: "Memory budget", key: "m" },
  { id: "evaluation", name: "Evaluation", key: "e" },
  { id: "store", name: "Store", key: "t" },
];

export function parse(hash) {
  const [path, query] = hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decode);
  const params = Object.fromEntries(new URLSearchParams(query ?? ""));
  if (parts[0] !== "run") return { run: null, screen: "runs", id: null, params };
  const screen = SCREENS.some((one) => one.id === parts[2]) ? parts[2] : "runs";
  return { run: parts[1] ?? null, screen, id: parts[3] ?? null, params };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function link({ run, screen, id, params = {} }) {
  const pairs = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(pairs).toString();
  const path = ["run", run ?? "main", screen, id].filter((part) => part !== null && part !== undefined && part !== "");
  return `#/${path.map((part) => encodeURIComponent(part)).join("/")}${query ? `?${query}` : ""}`;
}

export function go(place, { replace = false } = {}) {
  const target = link(place);
  if (target === location.hash) return;
  if (replace) {
    history.replaceState(null, "", target);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = target;
  }
}

export function usePlace() {
  const [place, setPlace] = useState(parse(location.hash));
  useEffect(() => {
    const changed = () => setPlace(parse(location.hash));
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return place;
}

// Keys of a screen: not while somebody types, nor with a modifier.
export function useKeys(handlers) {
  const current = useRef(handlers);
  current.current = handlers; // those of the last drawing, without waiting for effects
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range") return;
      const act = current.current[event.key];
      if (!act) return;
      event.preventDefault();
      act(event);
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  }, []);
}
