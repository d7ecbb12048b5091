"""Sources of a query's scores: saved scores, methods and datamodels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import GradkeepError, StoreError
from gradkeep.store import ScoresKey

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores
    from gradkeep.store.catalog._scan import BlockFacts
    from gradkeep.web._http import Captures
    from gradkeep.web._served import ServedStore

_MAX_MATRIX_BYTES = 24 << 20
"""Scores of all queries are computed at once up to this size, else query by query."""
_NEEDS_MODEL = ("influence", "arnoldi")
"""Without a model these use the Fisher matrix, as `gradkeep evaluate lds` does."""


@dataclass(frozen=True, slots=True)
class ScoreSource:
    """A source of scores: `saved:NAME`, `method:NAME`, `fit:NAME` or `study:NAME`."""

    id: str
    kind: str
    name: str
    method: str
    note: str
    exact: bool = True
    layered: bool = False
    queries: str | None = None
    """The split of the queries, where scores are saved."""
    outdated: bool = False
    """True if the captures that the scores were computed from have changed."""


def score_sources(served: ServedStore) -> list[ScoreSource]:
    """List all sources, saved scores first; nothing is computed."""
    from gradkeep.attribution._registry import methods

    sources: list[ScoreSource] = []
    for block in served.info().scores:
        facts, name = block.fingerprints, block.address.name
        if block.version is None or ScoresKey(name).names_rows or name.endswith(".counts"):
            continue
        if "digest" in facts:
            sources.append(
                ScoreSource(
                    f"saved:{name}",
                    "saved",
                    name,
                    str(facts.get("method")),
                    str(facts.get("scale")),
                    bool(facts.get("exact")),
                    _has_array(block, "per_layer"),
                    str(facts.get("queries")),
                    outdated=bool(served.store.changed_captures(facts)),
                )
            )
        elif _has_array(block, "weights"):
            note = f"weights of datamodels fitted to {facts.get('num_models')} models"
            sources.append(ScoreSource(f"fit:{name}", "fit", name, "datamodel", note, exact=False))
    for row_set in served.info().row_sets:
        name = row_set.facts.address.name
        if row_set.done and _has_array(row_set.facts, "masks") and ".removals" not in name:
            note = f"datamodels of the {row_set.done} models of {name}"
            source = ScoreSource(f"study:{name}", "study", name, "datamodel", note, exact=False)
            sources.append(source)
    return sources + [
        ScoreSource(f"method:{m.name}", "method", m.name, m.name, m.summary, m.exact, m.layered)
        for m in methods()
        if m.about_queries
    ]


def find_source(served: ServedStore, source_id: str) -> ScoreSource:
    """Return the source with an id."""
    sources = {source.id: source for source in score_sources(served)}
    if source_id not in sources:
        raise StoreError(
            f"no scores {source_id[:100]!r}",
            code="web.unknown_scores",
            found=", ".join(list(sources)[:12]),
            fix="gk.attribute(store, save=NAME) saves scores",
        )
    return sources[source_id]


def default_source(served: ServedStore, captures: Captures) -> str:
    """Return saved scores of these queries, else the default method."""
    from gradkeep.attribution._registry import default_method

    for source in score_sources(served):
        if source.kind == "saved" and source.queries == captures.queries and not source.outdated:
            return source.id
    try:
        method = default_method(
            served.store, run=captures.run, train=captures.train, name=captures.name
        )
    except GradkeepError:
        method = "kernel"
    return f"method:{method}"


def compute_scores(
    served: ServedStore,
    source: ScoreSource,
    captures: Captures,
    query: int,
    *,
    per_layer: bool = False,
) -> Scores:
    """Return scores that include a query: of all queries where they are small, else of it alone."""
    from gradkeep.attribution._scores import Scores

    if source.kind == "saved":
        return Scores.load(served.store, source.name, ids=[query])
    if source.kind == "fit":
        return _read_fit(served, source.name, query)
    version = served.sealed(captures.run, captures.name)
    if source.kind == "study":
        rows_done = [s.done for s in served.info().row_sets if s.facts.address.name == source.name]
        return served.tasks.get(
            ("study", source.name, version, *rows_done),
            f"fitting datamodels to {source.name}",
            lambda _: _fit_study(served, source.name),
            size=_num_bytes,
        )
    train = served.table(captures.run, captures.train, captures.name)
    queries = len(served.table(captures.run, captures.queries, captures.name).ids)
    layers = len(train.block.schema.layers) if per_layer else 1
    whole = 4 * layers * len(train.ids) * queries <= _MAX_MATRIX_BYTES
    return served.tasks.get(
        ("scores", source.id, captures, version, None if whole else query, per_layer),
        f"{source.name}: {f'all {queries} queries' if whole else f'query {query}'}",
        lambda _: _attribute(served, source, captures, None if whole else [query], per_layer),
        size=_num_bytes,
    )


def _num_bytes(scores: Scores) -> int:
    arrays = (scores.values, scores.per_layer, scores.train_ids, scores.train_labels)
    return sum(int(getattr(array, "nbytes", 0)) for array in arrays)


def _attribute(
    served: ServedStore,
    source: ScoreSource,
    captures: Captures,
    ids: list[int] | None,
    per_layer: bool,
) -> Scores:
    """Call `gk.attribute` at all checkpoints, or at the last for methods of one checkpoint."""
    from gradkeep.attribution._attribute import attribute
    from gradkeep.attribution._registry import methods

    (method,) = [one for one in methods() if one.name == source.name]
    checkpoints = served.checkpoints(captures.run, captures.name, captures.queries, captures.train)
    options: dict[str, Any] = {"curvature": "fisher"} if source.name in _NEEDS_MODEL else {}
    return attribute(
        served.store,
        method=source.name,
        queries=captures.queries,
        train=captures.train,
        run=captures.run,
        name=captures.name,
        checkpoints=checkpoints[-1:] if method.over == "one" else checkpoints,
        ids=ids,
        per_layer=per_layer,
        memory_budget="192MiB",
        **options,
    )


def _read_fit(served: ServedStore, name: str, query: int) -> Scores:
    from gradkeep.attribution._scores import Scores

    block = served.store.read(ScoresKey(name))
    values = np.asarray(block.read([query], ["weights"])["weights"], np.float32)
    return Scores(
        values,
        np.array([query]),
        np.arange(values.shape[1]),
        method="datamodel",
        scale="change of the output with the row",
        exact=False,
        approximate=f"fitted to {block.schema.fingerprints.get('num_models')} models",
    )


def _fit_study(served: ServedStore, name: str) -> Scores:
    from gradkeep.evaluate import datamodel_scores, load_truth

    return datamodel_scores(load_truth(served.store, name))


def _has_array(block: BlockFacts, name: str) -> bool:
    return any(array.name == name for array in block.arrays)
