"""The report: the page's own screens with their answers inside, in one file without a server."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gradkeep import _arguments
from gradkeep.errors import GradkeepError, StoreError
from gradkeep.web._app import questions, served_store
from gradkeep.web._background import StillWorking
from gradkeep.web._responses import static_files, to_json

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep._preview import Preview
    from gradkeep.evaluate import Recipe
    from gradkeep.store import Store
    from gradkeep.web._served import ServedStore
    from gradkeep.web._store_screen import RunView

_UNRESERVED = "-_.!~*'()"
"""What JavaScript's encodeURIComponent leaves as it is."""
_WRONG, _UNSURE, _FIRST = 24, 8, 8
"""Queries that are explained in a report: mistakes, unsure ones, the first of all."""
_RUNS = 3
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
)
_IMPORT = re.compile(r'(from|import) "\./([\w/.-]+)"')


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

    It holds all runs, evaluations and sizes, the first suspects, the map of gradients, and the
    explanations of the mistakes, of the least sure queries and of the first ones. Cost: that of
    asking each of these.
    """
    out = Path(_arguments.file_to_write(path, error=StoreError))
    served = served_store(store, data=data, recipe=recipe, logs=logs)
    served.info()  # a store that cannot be read is told at once
    asked = _Answers(served, progress)
    asked.collect()
    out.write_bytes(_page(asked.found))
    return out


class _Answers:
    """Answers by the address under which the page asks for them."""

    def __init__(
        self, served: ServedStore, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._questions = questions(served)
        self._progress = progress
        self.found: dict[str, Any] = {}
        self._total = 1

    def ask(self, path: str, **params: Any) -> Any:
        """The answer to one question, waited for; None where it cannot be answered."""
        url = address(path, params)
        if url in self.found:
            return self.found[url]
        given = {name: value for name, value in params.items() if value not in ("", None)}
        until = time.monotonic() + 3600.0
        while True:
            try:
                answer = self._questions[f"/{path}"](**given)
            except StillWorking:
                if time.monotonic() > until:
                    return None
                time.sleep(0.02)
                continue
            except GradkeepError:
                return None
            if _is_working(answer):
                time.sleep(0.02)
                continue
            self.found[url] = answer
            if self._progress is not None:
                self._progress(len(self.found), max(self._total, len(self.found)))
            return answer

    def collect(self) -> None:
        """All that the page asks for by itself."""
        for path in ("api/session", "api/runs", "api/sources", "api/store", "api/evaluations"):
            self.ask(path)
        runs = self.found[address("api/runs", {})].runs if self.found else []
        self._total = 10 + len(runs[:_RUNS]) * (2 * (_WRONG + _UNSURE + _FIRST) + 20)
        memory = self.ask("api/memory")
        if memory is not None and memory.curves:
            self.ask("api/memory/timeline", log=memory.log, heuristic="dtr-eq", ratio=0.5)
        for run in runs[:_RUNS]:
            self._collect_run(run)

    def _collect_run(self, run: RunView) -> None:
        if not run.captures or run.train is None:
            return
        name = run.captures[0]
        captured = {"run": run.name, "name": name}
        self.ask("api/suspects", **captured, split=run.train, by="loss", show="all", count=40)
        drawn = self.ask(
            "api/clusters",
            **captured,
            split=run.train,
            queries=run.queries or "test",
            of="gradients",
            clusters=8,
        )
        for one in () if drawn is None else drawn.clusters:
            pairs = zip(drawn.ids, drawn.cluster, strict=True)
            rows = [row for row, cluster in pairs if cluster == one.number][:40]
            self.ask("api/rows", **captured, split=drawn.split, row=rows)
        if run.queries is not None:
            self._collect_queries(run, captured)

    def _collect_queries(self, run: RunView, captured: dict[str, Any]) -> None:
        chosen: dict[int, None] = {}
        lists = {}
        for show, most in (("wrong", _WRONG), ("unsure", _UNSURE), ("all", _FIRST)):
            where = {**captured, "split": run.queries, "show": show, "count": 40}
            found = self.ask("api/queries", **where)
            if found is None:
                continue
            lists[address("api/queries", where)] = found
            chosen.update(dict.fromkeys(row.id for row in found.rows[:most]))
        asked = {**captured, "queries": run.queries, "train": run.train}
        told = set()
        for query in chosen:
            found = self.ask("api/why", **asked, query=query, k=8)
            if found is None or found.answers[0].source is None or found.answers[0].problem:
                continue
            told.add(query)
            source = found.answers[0].source
            self.ask("api/why/groups", **asked, query=query, source=source.id)
            if source.layered:
                self.ask("api/why/layers", **asked, query=query, source=source.id, k=8)
        for url, found in lists.items():
            rows = [row for row in found.rows if row.id in told]
            self.found[url] = dataclasses.replace(found, rows=rows)


def address(path: str, params: Mapping[str, Any]) -> str:
    """The address of a question as the page writes it.

    >>> address("api/why", {"query": 7, "source": ["method:dot"], "k": 8, "search": ""})
    'api/why?k=8&query=7&source=method%3Adot'
    """
    pairs = [
        f"{name}={quote(str(one), safe=_UNRESERVED)}"
        for name in sorted(params)
        for one in (params[name] if isinstance(params[name], list | tuple) else [params[name]])
        if one not in ("", None)
    ]
    return f"{path}?{'&'.join(pairs)}" if pairs else path


def _is_working(answer: Any) -> bool:
    return any(one.working for one in getattr(answer, "answers", ()))


def _page(answers: dict[str, Any]) -> bytes:
    files = static_files()
    modules = {
        f"gk/{name}": _data_url(_IMPORT.sub(r'\1 "gk/\2"', file.content.decode()))
        for name, file in files.items()
        if name.endswith(".js") and name != "vendor/uplot.js"
    }
    told = to_json(answers).decode().replace("<", "\\u003c")
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
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>gradkeep</title>
<link rel="icon" href="data:,">
<style>
{styles}
</style>
<script type="application/json" id="gradkeep-answers">{told}</script>
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
