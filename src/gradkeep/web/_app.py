"""The application: one address for each question of the page, all of them described by OpenAPI."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio.to_thread
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from gradkeep import __version__
from gradkeep._preview import Preview
from gradkeep.errors import CaptureError, GradkeepError, MissingRows, NotAStore
from gradkeep.web._background import StillWorking
from gradkeep.web._clusters_screen import draw_map, list_evaluations
from gradkeep.web._guard import Access, Guard
from gradkeep.web._memory_screen import HEURISTICS, draw_curves, draw_timeline
from gradkeep.web._responses import ProblemView, problem_of, static_files, to_json
from gradkeep.web._score_sources import Asked, score_sources
from gradkeep.web._served import ANY_SPLIT, ServedStore, row_views
from gradkeep.web._store_screen import check_health, list_runs, look_at_store
from gradkeep.web._suspects_screen import (
    Measure,
    QueueFilter,
    decide,
    exported,
    list_suspects,
    retrain,
    suggest,
)
from gradkeep.web._why_screen import (
    QueryFilter,
    explain,
    group_rows,
    list_queries,
    random_query,
    split_layers,
    split_tokens,
)

_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}$"
_SOURCE = r"^(saved|method|fit|study):[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}$"
_MAP = r"^(gradients|(fit|study):[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99})$"
_LARGEST = 2**62
TOKEN_PLACE = b"GRADKEEP-TOKEN"

Name = Annotated[str, Query(pattern=_NAME)]
Row = Annotated[int, Query(ge=-_LARGEST, le=_LARGEST)]
Count = Annotated[int, Query(ge=1, le=120)]
Start = Annotated[int, Query(ge=0, le=2**31)]
Sources = Annotated[list[Annotated[str, Field(pattern=_SOURCE)]], Query(max_length=2)]
Source = Annotated[str, Query(pattern=_SOURCE)]
Rows = Annotated[list[Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)]], Query(max_length=60)]


class GivenDecision(BaseModel):
    """What the page sends of a decision."""

    model_config = ConfigDict(extra="forbid", strict=True)
    run: str = Field("main", pattern=_NAME)
    split: str = Field("train", pattern=_NAME)
    name: str = Field("main", pattern=_NAME)
    row: int = Field(ge=-_LARGEST, le=_LARGEST)
    action: Literal["accept", "relabel", "undo"]
    label: int | None = Field(None, ge=-_LARGEST, le=_LARGEST)


class GivenCapture(BaseModel):
    """Which capture an act is about."""

    model_config = ConfigDict(extra="forbid", strict=True)
    run: str = Field("main", pattern=_NAME)
    split: str = Field("train", pattern=_NAME)
    name: str = Field("main", pattern=_NAME)


def create_app(
    store: Any,
    *,
    data: Preview | Mapping[str, Preview] | None = None,
    recipe: Any = None,
    logs: Sequence[str | os.PathLike[str]] = (),
    access: Access | None = None,
) -> FastAPI:
    """The page about a store as an ASGI application.

    `data` says how rows are shown, for all splits or by split; `recipe` (a `gk.evaluate.Recipe`) how
    models are trained; `logs` are recorded training steps. `access` says who may ask: by default
    this machine alone.
    """
    served = served_store(store, data=data, recipe=recipe, logs=logs)
    return app_of(served, access or Access(secrets.token_urlsafe(24)))


def served_store(store: Any, *, data: Any, recipe: Any, logs: Sequence[Any]) -> ServedStore:
    """What was given, as it is served."""
    location = getattr(store, "location", None) or os.fspath(store)
    paths = tuple(Path(log).resolve() for log in logs)
    return ServedStore(str(location), _previews_of(data), recipe, paths)


def _previews_of(data: Any) -> dict[str, Preview]:
    """Previews by split."""
    if data is None:
        return {}
    if isinstance(data, Preview):
        return {ANY_SPLIT: data}
    if isinstance(data, Mapping) and all(isinstance(one, Preview) for one in data.values()):
        return {str(split): one for split, one in data.items()}
    raise CaptureError(
        "data says how rows are shown",
        found=type(data).__name__,
        expected="a gk.Preview, or one for each split: {'train': ..., 'test': ...}",
    )


def app_of(served: ServedStore, access: Access) -> FastAPI:
    """The application about what is served."""
    app = FastAPI(
        lifespan=_few_threads,
        title="gradkeep",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    for path, function in questions(served).items():
        app.add_api_route(path, _answering(function), methods=["GET"], response_model=None)
    for path, act in _acts(served).items():
        app.add_api_route(path, _answering(act), methods=["POST"], response_model=None)
    _add_files(app, access.token)
    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(HTTPException, _not_there)
    app.add_middleware(Guard, access=access)
    return app


@contextlib.asynccontextmanager
async def _few_threads(_: FastAPI) -> AsyncIterator[None]:
    """One person looks at the page: each further thread would only hold memory of its own."""
    limiter = anyio.to_thread.current_default_thread_limiter()
    limiter.total_tokens = 6
    yield


def questions(served: ServedStore) -> dict[str, Callable[..., Any]]:
    """What can be asked, by address; asking changes nothing."""

    def session() -> Any:
        return {
            "version": __version__,
            "location": served.location,
            "recipe": served.recipe is not None,
            "previews": sorted(served.previews),
            "heuristics": HEURISTICS,
        }

    def runs() -> Any:
        return list_runs(served)

    def store() -> Any:
        return look_at_store(served)

    def health() -> Any:
        return check_health(served, begin=False)

    def sources() -> Any:
        return score_sources(served)

    def queries(
        run: Name = "main",
        split: Name = "test",
        name: Name = "main",
        show: QueryFilter = "all",
        search: Annotated[str, Query(max_length=200)] = "",
        start: Start = 0,
        count: Count = 40,
    ) -> Any:
        asked = Asked(run, split, "train", name)
        return list_queries(served, asked, show=show, search=search, start=start, count=count)

    def random_one(
        run: Name = "main", split: Name = "test", name: Name = "main", show: QueryFilter = "wrong"
    ) -> Any:
        return random_query(served, Asked(run, split, "train", name), show=show)

    def why(
        query: Row,
        run: Name = "main",
        queries: Name = "test",
        train: Name = "train",
        name: Name = "main",
        source: Sources = [],  # noqa: B006 - FastAPI copies it
        k: Annotated[int, Query(ge=1, le=50)] = 8,
    ) -> Any:
        return explain(served, Asked(run, queries, train, name), query, sources=source, k=k)

    def layers(
        query: Row,
        source: Source,
        run: Name = "main",
        queries: Name = "test",
        train: Name = "train",
        name: Name = "main",
        k: Annotated[int, Query(ge=1, le=50)] = 8,
    ) -> Any:
        return split_layers(served, Asked(run, queries, train, name), query, source=source, k=k)

    def groups(
        query: Row,
        source: Source,
        run: Name = "main",
        queries: Name = "test",
        train: Name = "train",
        name: Name = "main",
    ) -> Any:
        return group_rows(served, Asked(run, queries, train, name), query, source=source)

    def tokens(
        query: Row,
        row: Rows,
        run: Name = "main",
        queries: Name = "test",
        train: Name = "train",
        name: Name = "main",
    ) -> Any:
        return split_tokens(served, Asked(run, queries, train, name), query, rows=row)

    def rows(row: Rows, run: Name = "main", split: Name = "train", name: Name = "main") -> Any:
        return row_views(served, served.table(run, split, name), row)

    def suspects(
        run: Name = "main",
        split: Name = "train",
        name: Name = "main",
        by: Measure = "loss",
        show: QueueFilter = "all",
        start: Start = 0,
        count: Count = 40,
    ) -> Any:
        return list_suspects(
            served, run=run, split=split, name=name, by=by, show=show, start=start, count=count
        )

    def suggestions(split: Name = "train") -> Any:
        suggest(served, split=split, begin=False)
        return {"there": True}

    def retrained(run: Name = "main", split: Name = "train", name: Name = "main") -> Any:
        return retrain(served, run=run, split=split, name=name, begin=False)

    def decisions(split: Name = "train") -> Any:
        return served.decisions(split)

    def export(split: Name = "train", form: Literal["csv", "json"] = "csv") -> Any:
        kinds = {"csv": "text/csv; charset=utf-8", "json": "application/json"}
        named = f'attachment; filename="decisions-{split}.{form}"'
        content = exported(served, split, form=form)
        return Response(content, media_type=kinds[form], headers={"content-disposition": named})

    def clusters(
        run: Name = "main",
        split: Name = "train",
        queries: Name = "test",
        name: Name = "main",
        of: Annotated[str, Query(pattern=_MAP)] = "gradients",
        clusters: Annotated[int, Query(ge=1, le=24)] = 8,
    ) -> Any:
        return draw_map(
            served, run=run, split=split, queries=queries, name=name, of=of, clusters=clusters
        )

    def memory(log: Annotated[str, Query(max_length=200)] = "") -> Any:
        return draw_curves(served, log=log)

    def timeline(
        log: Annotated[str, Query(max_length=200)],
        heuristic: Literal["dtr-eq", "dtr-local", "lru", "largest"] = "dtr-eq",
        ratio: Annotated[float, Query(gt=0, le=1)] = 0.5,
    ) -> Any:
        return draw_timeline(served, log=log, heuristic=heuristic, ratio=round(ratio, 3))

    def evaluations() -> Any:
        return list_evaluations(served)

    return {
        "/api/session": session,
        "/api/runs": runs,
        "/api/store": store,
        "/api/health": health,
        "/api/sources": sources,
        "/api/queries": queries,
        "/api/queries/random": random_one,
        "/api/why": why,
        "/api/why/layers": layers,
        "/api/why/groups": groups,
        "/api/why/tokens": tokens,
        "/api/rows": rows,
        "/api/suspects": suspects,
        "/api/suspects/suggestions": suggestions,
        "/api/suspects/retrained": retrained,
        "/api/decisions": decisions,
        "/api/decisions/export": export,
        "/api/clusters": clusters,
        "/api/memory": memory,
        "/api/memory/timeline": timeline,
        "/api/evaluations": evaluations,
    }


def _acts(served: ServedStore) -> dict[str, Callable[..., Any]]:
    """What changes something: decisions, and work that is begun on purpose."""

    def decided(given: GivenDecision) -> Any:
        return decide(served, **given.model_dump())

    def verified() -> Any:
        return check_health(served, begin=True)

    def suggested(given: GivenCapture) -> Any:
        suggest(served, split=given.split, begin=True)
        return {"there": True}

    def retrained(given: GivenCapture) -> Any:
        return retrain(served, run=given.run, split=given.split, name=given.name, begin=True)

    return {
        "/api/decisions": decided,
        "/api/health": verified,
        "/api/suspects/suggestions": suggested,
        "/api/suspects/retrained": retrained,
    }


def _answering(function: Callable[..., Any]) -> Callable[..., Response]:
    """The question with an answer for everything that can go wrong in it."""

    @functools.wraps(function)
    def answer(*args: Any, **given: Any) -> Response:
        try:
            found = function(*args, **given)
        except StillWorking as working:
            told = {"working": working.what, "done": working.done, "total": working.total}
            return _json(told, 202)
        except MissingRows as error:
            return _json({"problem": problem_of(error)}, 404)
        except GradkeepError as error:
            status = 410 if isinstance(error, NotAStore) else 409
            return _json({"problem": problem_of(error)}, status)
        except OSError as error:
            said = error.strerror or type(error).__name__
            return _json({"problem": ProblemView("OSError", f"the system said: {said}")}, 409)
        except Exception as error:
            # Ours to mend, and told as such; everything else on the page goes on working.
            what = f"an error of gradkeep itself: {type(error).__name__}"
            return _json({"problem": ProblemView("OurFault", what)}, 503)
        return found if isinstance(found, Response) else _json(found)

    return answer


def _add_files(app: FastAPI, token: str) -> None:
    files = static_files()
    index = files["index.html"].content.replace(TOKEN_PLACE, token.encode())

    def front() -> Response:
        return Response(index, media_type="text/html; charset=utf-8")

    def file(path: str) -> Response:
        found = files.get(path)
        if found is None or path == "index.html":
            raise HTTPException(404)
        # Names are not versioned: a browser asks again, and is told in few bytes.
        return Response(found.content, media_type=found.kind, headers={"cache-control": "no-cache"})

    app.add_api_route("/", front, include_in_schema=False, response_model=None)
    app.add_api_route("/static/{path:path}", file, include_in_schema=False, response_model=None)


def _json(answer: Any, status: int = 200) -> Response:
    return Response(to_json(answer), status, media_type="application/json")


async def _not_understood(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    parts = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()[:5]]
    what = "the request cannot be understood"
    return _json({"problem": ProblemView("Refused", what, found="; ".join(parts))}, 422)


async def _not_there(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "there is nothing under this address", 405: "this cannot be done here"}
    what = said.get(error.status_code, "refused")
    return Response(
        to_json({"problem": ProblemView("Refused", what)}),
        error.status_code,
        dict(error.headers or {}),
        "application/json",
    )
