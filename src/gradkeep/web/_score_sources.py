"""Where the scores of a query come from: saved ones, methods that are asked, datamodels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import GradkeepError, StoreError
from gradkeep.store import ScoresKey

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores
    from gradkeep.store.catalog._scan import BlockFacts
    from gradkeep.web._served import ServedStore

_WHOLE = 24 << 20
"""Bytes: scores of all queries up to this are made at once, larger ones query by query."""
_BUDGET = "192MiB"
_NEEDS_A_MODEL = ("influence", "arnoldi")
"""From a store alone these take the Fisher matrix, as `gradkeep evaluate lds` does."""


@dataclass(frozen=True, slots=True)
class ScoreSource:
    """One way to answer why: `saved:NAME`, `method:NAME`, `fit:NAME` or `study:NAME`."""

    id: str
    kind: str
    name: str
    method: str
    note: str
    """What it computes."""
    exact: bool = True
    layered: bool = False
    queries: str | None = None
    """The split of the queries, where only that can be asked."""
    outdated: bool = False
    """Whether captures that the scores were computed from hold other rows by now."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Which captures a question is about."""

    run: str
    queries: str
    train: str
    name: str


def score_sources(served: ServedStore) -> list[ScoreSource]:
    """All ways there are, saved scores first; cheap, nothing is computed."""
    found: list[ScoreSource] = []
    for block in served.info().scores:
        told = block.fingerprints
        name = block.address.name
        if block.version is None or ScoresKey(name).names_rows or name.endswith(".counts"):
            continue
        if "digest" in told:
            found.append(
                ScoreSource(
                    f"saved:{name}",
                    "saved",
                    name,
                    str(told.get("method")),
                    str(told.get("scale")),
                    bool(told.get("exact")),
                    _has(block, "per_layer"),
                    str(told.get("queries")),
                    outdated=bool(served.store.changed_captures(told)),
                )
            )
        elif _has(block, "weights"):
            note = f"weights of datamodels fitted to {told.get('num_models')} models"
            found.append(ScoreSource(f"fit:{name}", "fit", name, "datamodel", note, exact=False))
    for row_set in served.info().row_sets:
        if (
            _has(row_set.facts, "masks")
            and row_set.done
            and ".removals" not in (name := row_set.facts.address.name)
        ):
            note = f"datamodels of the {row_set.done} models of {name}"
            found.append(
                ScoreSource(f"study:{name}", "study", name, "datamodel", note, exact=False)
            )
    from gradkeep.attribution._registry import methods

    found += [
        ScoreSource(
            f"method:{one.name}", "method", one.name, one.name, one.summary, one.exact, one.layered
        )
        for one in methods()
        if one.about_queries
    ]
    return found


def source_named(served: ServedStore, given: str) -> ScoreSource:
    """The source with that id."""
    known = {one.id: one for one in score_sources(served)}
    if given not in known:
        raise StoreError(
            f"no scores {given[:100]!r}",
            found=", ".join(list(known)[:12]),
            fix="gk.attribute(store, save=NAME) keeps scores",
        )
    return known[given]


def default_source(served: ServedStore, asked: Asked) -> str:
    """What is shown if nobody says otherwise: saved scores of these queries, else the best method."""
    from gradkeep.attribution._registry import default_method

    for one in score_sources(served):
        if one.kind == "saved" and one.queries == asked.queries and not one.outdated:
            return one.id
    try:
        method = default_method(served.store, run=asked.run, train=asked.train, name=asked.name)
    except GradkeepError:
        method = "kernel"
    return f"method:{method}"


def scores_for(
    served: ServedStore,
    source: ScoreSource,
    asked: Asked,
    query: int,
    *,
    per_layer: bool = False,
) -> Scores:
    """Scores that hold the query: of it alone, or of all queries where these are few."""
    from gradkeep.attribution._scores import Scores

    if source.kind == "saved":
        return Scores.load(served.store, source.name, ids=[query])
    if source.kind == "fit":
        return _of_fit(served, source.name, query)
    age = (*served.sealed(asked.run, asked.name), *_rows_done(served, source))
    if source.kind == "study":
        return served.desk.ask(
            ("study", source.name, age),
            f"fitting datamodels to {source.name}",
            lambda _: _of_study(served, source.name),
            size=_bytes_of,
        )
    train = served.table(asked.run, asked.train, asked.name)
    queries = len(served.table(asked.run, asked.queries, asked.name).ids)
    layers = len(train.block.schema.layers) if per_layer else 1
    whole = 4 * layers * len(train.ids) * queries <= _WHOLE
    return served.desk.ask(
        ("scores", source.id, asked, age, None if whole else query, per_layer),
        f"asking {source.name} about {f'all {queries} queries' if whole else f'query {query}'}",
        lambda _: _ask_method(served, source, asked, None if whole else [query], per_layer),
        size=_bytes_of,
    )


def _bytes_of(scores: Scores) -> int:
    parts = (scores.values, scores.per_layer, scores.train_ids, scores.train_labels)
    return sum(int(getattr(part, "nbytes", 0)) for part in parts)


def _ask_method(
    served: ServedStore, source: ScoreSource, asked: Asked, ids: list[int] | None, per_layer: bool
) -> Scores:
    """What `gk.attribute` says, at all checkpoints or, of methods about one, at the last."""
    from gradkeep.attribution._attribute import attribute
    from gradkeep.attribution._registry import methods

    (method,) = [one for one in methods() if one.name == source.name]
    places = served.checkpoints(asked.run, asked.name, asked.queries, asked.train)
    options: dict[str, Any] = {"curvature": "fisher"} if source.name in _NEEDS_A_MODEL else {}
    return attribute(
        served.store,
        method=source.name,
        queries=asked.queries,
        train=asked.train,
        run=asked.run,
        name=asked.name,
        checkpoints=places[-1:] if method.over == "one" else places,
        ids=ids,
        per_layer=per_layer,
        memory_budget=_BUDGET,
        **options,
    )


def _of_fit(served: ServedStore, name: str, query: int) -> Scores:
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


def _of_study(served: ServedStore, name: str) -> Scores:
    from gradkeep.evaluate import datamodel_scores, load_truth

    return datamodel_scores(load_truth(served.store, name))


def _rows_done(served: ServedStore, source: ScoreSource) -> tuple[tuple[str, str, int], ...]:
    found = [
        ("", one.facts.address.name, one.done)
        for one in served.info().row_sets
        if source.kind == "study" and one.facts.address.name == source.name
    ]
    return tuple(found)


def _has(block: BlockFacts, array: str) -> bool:
    return any(one.name == array for one in block.arrays)
