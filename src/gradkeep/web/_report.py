"""The report: the page and the answers to its questions in one HTML file, without a server."""

from __future__ import annotations

import base64
import dataclasses
import inspect
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gradkeep import _arguments
from gradkeep.errors import GradkeepError, StoreError
from gradkeep.web._app import READS, serve_store
from gradkeep.web._background import BusyError
from gradkeep.web._http import Captures, static_files, to_json

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep._preview import Preview
    from gradkeep.evaluate import Recipe
    from gradkeep.store import Store
    from gradkeep.web._served import ServedStore

_QUERIES = {"wrong": 24, "unsure": 8, "all": 8}
"""How many queries of each kind are explained."""
_CONTENT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
)


def write_report(
    store: Store | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    data: Preview | Mapping[str, Preview] | None = None,
    recipe: Recipe | None = None,
    logs: Sequence[str | os.PathLike[str]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the page about a store into one HTML file that needs no server and no network.

    It contains all runs, evaluations and sizes, the first suspects, the map of gradients, and the
    explanations of wrong, unsure and first queries. Cost: that of asking each of these.
    """
    out = Path(_arguments.file_to_write(path, error=StoreError))
    served = serve_store(store, data=data, recipe=recipe, logs=logs)
    served.info()  # fail early if the store cannot be read
    collector = _AnswerCollector(served, progress)
    collector.collect()
    out.write_bytes(_render_page(collector.answers))
    return out


class _AnswerCollector:
    """Collects answers by the address under which the page asks for them."""

    def __init__(
        self, served: ServedStore, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._served, self._progress = served, progress
        self._total = 1
        self.answers: dict[str, Any] = {}

    def ask(self, path: str, **parameters: Any) -> Any:
        """Wait for the answer to one question; None if it fails."""
        url = request_url(path, parameters)
        if url in self.answers:
            return self.answers[url]
        deadline = time.monotonic() + 3600.0
        while True:
            try:
                answer = self._call(path, parameters)
            except GradkeepError:
                return None
            if answer is not None:
                break
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        self.answers[url] = answer
        if self._progress is not None:
            self._progress(len(self.answers), max(self._total, len(self.answers)))
        return answer

    def _call(self, path: str, parameters: Mapping[str, Any]) -> Any:
        """Return an answer, or None while it is being computed."""
        route = READS[f"/{path}"]
        options = {name: value for name, value in parameters.items() if value not in ("", None)}
        if "captures" in inspect.signature(route).parameters:
            names = [field.name for field in dataclasses.fields(Captures)]
            chosen = {name: options.pop(name) for name in names if name in options}
            options["captures"] = Captures(**chosen)
        try:
            answer = route(self._served, **options)
        except BusyError:
            return None
        sources = answer.get("answers", ()) if isinstance(answer, dict) else ()
        return None if any(source["working"] for source in sources) else answer

    def collect(self) -> None:
        """Ask everything that the page asks without a click."""
        for path in ("api/session", "api/runs", "api/sources", "api/store", "api/evaluations"):
            self.ask(path)
        runs = (self.ask("api/runs") or {"runs": []})["runs"][:3]
        self._total = 10 + len(runs) * (2 * sum(_QUERIES.values()) + 20)
        memory = self.ask("api/memory")
        if memory is not None and memory["curves"]:
            self.ask("api/memory/timeline", log=memory["log"], heuristic="dtr-eq", ratio=0.5)
        for run in runs:
            if run["captures"] and run["train"] is not None:
                self._collect_run(run)

    def _collect_run(self, run: Mapping[str, Any]) -> None:
        capture = {"run": run["name"], "name": run["captures"][0]}
        train, queries = run["train"], run["queries"]
        self.ask("api/suspects", **capture, split=train, by="loss", show="all", count=40)
        row_map = self.ask(
            "api/clusters",
            **capture,
            split=train,
            queries=queries or "test",
            of="gradients",
            clusters=8,
        )
        for cluster in () if row_map is None else row_map["clusters"]:
            pairs = zip(row_map["ids"], row_map["cluster"], strict=True)
            rows = [row for row, number in pairs if number == cluster["number"]][:40]
            self.ask("api/rows", **capture, split=row_map["split"], row=rows)
        if queries is not None:
            self._collect_queries(capture, queries, train)

    def _collect_queries(self, capture: dict[str, Any], queries: str, train: str) -> None:
        chosen: dict[int, None] = {}
        lists = {}
        for show, count in _QUERIES.items():
            parameters = {**capture, "split": queries, "show": show, "count": 40}
            answer = self.ask("api/queries", **parameters)
            if answer is not None:
                lists[request_url("api/queries", parameters)] = answer
                chosen.update(dict.fromkeys(row["id"] for row in answer["rows"][:count]))
        captures = {**capture, "queries": queries, "train": train}
        explained = set()
        for query in chosen:
            answer = self.ask("api/why", **captures, query=query, k=8)
            first = None if answer is None else answer["answers"][0]
            if first is None or first["source"] is None or first["problem"]:
                continue
            explained.add(query)
            source = first["source"]
            self.ask("api/why/groups", **captures, query=query, source=source.id)
            if source.layered:
                self.ask("api/why/layers", **captures, query=query, source=source.id, k=8)
        for url, answer in lists.items():  # list only queries that the report explains
            rows = [row for row in answer["rows"] if row["id"] in explained]
            self.answers[url] = answer | {"rows": rows}


def request_url(path: str, parameters: Mapping[str, Any]) -> str:
    """Return the address of a request as the page writes it.

    >>> request_url("api/why", {"query": 7, "source": ["method:dot"], "k": 8, "search": ""})
    'api/why?k=8&query=7&source=method%3Adot'
    """
    pairs = []
    for name, value in sorted(parameters.items()):
        for one in value if isinstance(value, list | tuple) else [value]:
            if one not in ("", None):
                encoded = quote(str(one), safe="-_.!~*'()")  # as JavaScript's encodeURIComponent
                pairs.append(f"{name}={encoded}")
    return f"{path}?{'&'.join(pairs)}" if pairs else path


def _render_page(answers: dict[str, Any]) -> bytes:
    files = static_files()
    modules = {
        f"gk/{name}": _data_url(
            re.sub(r'(from|import) "\./([\w/.-]+)"', r'\1 "gk/\2"', file.content.decode())
        )
        for name, file in files.items()
        if name.endswith(".js") and name != "vendor/uplot.js"
    }
    embedded = to_json(answers).decode().replace("<", "\\u003c")
    styles = "\n".join(files[name].content.decode() for name in ("vendor/uplot.css", "page.css"))
    charts = files["vendor/uplot.js"].content.decode().replace("</script", "<\\/script")
    licences = "\n\n".join(
        f"{name.removeprefix('vendor/')}\n{file.content.decode()}"
        for name, file in files.items()
        if name.endswith("-LICENSE.txt")
    ).replace("--", "- -")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>gradkeep</title>
<link rel="icon" href="data:,">
<style>
{styles}
</style>
<script type="application/json" id="gradkeep-answers">{embedded}</script>
<script>{charts}</script>
<script type="importmap">{json.dumps({"imports": modules})}</script>
<script type="module">import "gk/app.js";</script>
</head>
<body>
<noscript>This page needs JavaScript.</noscript>
</body>
</html>
<!--
{licences}
-->
""".encode()


def _data_url(text: str) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"
