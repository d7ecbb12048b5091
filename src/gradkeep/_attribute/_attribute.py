"""Which training rows made the model do that: one function for every method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import query
from gradkeep._attribute._methods import Method, method_named
from gradkeep._attribute._scores import Scores
from gradkeep._errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.query import Gradients, Plan
    from gradkeep.query._engine import Wanted
    from gradkeep.store import Store


def attribute(
    store: Store,
    *,
    queries: str = "test",
    train: str = "train",
    method: str = "dot",
    checkpoints: str | Sequence[str] | None = None,
    layers: str | Sequence[str] | None = None,
    ids: Any = None,
    run: str = "main",
    name: str = "main",
    lrs: Sequence[float] | None = None,
    plan: Wanted = None,
    memory_budget: int | str | None = None,
) -> Scores:
    """Score every training row for every query, from what was captured; nothing is run again.

    `checkpoints` defaults to the only one (for `tracin` and `self`: all) at which both splits were
    captured. `ids` picks queries. `lrs` are the learning rates of `tracin`; by default those that
    the checkpoints were captured with.

    >>> import gradkeep as gk, tempfile, torch
    >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
    >>> for split, rows in (("train", 6), ("test", 2)):
    ...     data = [(torch.randn(rows, 4), torch.arange(rows) % 3)]
    ...     _ = gk.capture(store, model, data, task=gk.Classification(), split=split)
    >>> gk.attribute(store).shape
    (2, 6)
    """
    chosen = method_named(method)
    at = _checkpoints(store, chosen, checkpoints, queries=queries, train=train, run=run, name=name)

    def sides(split: str) -> list[Gradients]:
        return [
            query.gradients(store, split=split, checkpoint=c, run=run, name=name, layers=layers)
            for c in at
        ]

    if chosen.name == "self":
        return _own(chosen, sides(train), train, at)
    asked, rows = sides(queries), sides(train)
    if chosen.name == "cos":
        found = query.cosine(asked, rows, ids=ids, plan=plan, memory_budget=memory_budget)
    else:
        weights = _learning_rates(store, run, at, lrs) if chosen.name == "tracin" else None
        found = query.dot(
            asked, rows, weights=weights, ids=ids, plan=plan, memory_budget=memory_budget
        )
    return _scores(
        chosen, found.values.numpy(), found.query_ids, rows, queries, train, at, found.plan
    )


def _own(chosen: Method, rows: list[Gradients], train: str, at: list[str]) -> Scores:
    total = sum(side.norms().double().square() for side in rows)
    values = np.asarray(total, np.float32)[None]
    return _scores(chosen, values, np.zeros(1, np.int64), rows, train, train, at, None)


def _scores(
    chosen: Method,
    values: Any,
    query_ids: Any,
    rows: list[Gradients],
    queries: str,
    train: str,
    at: list[str],
    plan: Plan | None,
) -> Scores:
    return Scores(
        values=values,
        query_ids=query_ids,
        train_ids=rows[0].ids,
        method=chosen.name,
        queries=queries,
        train=train,
        checkpoints=tuple(at),
        layers=tuple(rows[0].forms),
        scale=chosen.summary,
        exact=chosen.exact,
        plan=plan,
    )


def _checkpoints(
    store: Store,
    chosen: Method,
    wanted: str | Sequence[str] | None,
    *,
    queries: str,
    train: str,
    run: str,
    name: str,
) -> list[str]:
    if wanted is not None:
        found = [wanted] if isinstance(wanted, str) else list(wanted)
        if not found:
            raise AttributionError("no checkpoint was given")
    else:
        keys = [key for key in store.captures() if (key.run, key.capture) == (run, name)]
        splits = {train} if chosen.name == "self" else {train, queries}
        both = set.intersection(*({k.checkpoint for k in keys if k.split == s} for s in splits))
        steps = {c.name: c.step for c in store.checkpoints(run)}
        found = sorted(both, key=lambda c: (steps.get(c) is None, steps.get(c) or 0, c))
        if not found:
            raise AttributionError(
                f"{queries!r} and {train!r} were not captured at the same checkpoint",
                path=store.location,
                found=", ".join(f"{k.split} at {k.checkpoint}" for k in keys) or "no captures",
                fix=f"gk.capture(store, model, loader, task=task, split={queries!r}), "
                f"and the same for {train!r}",
            )
    if len(found) > 1 and chosen.name in ("dot", "cos"):
        raise AttributionError(
            f"{chosen.name} is about one checkpoint",
            found=", ".join(found),
            fix=f"pass checkpoints={found[-1]!r}, or method='tracin' for all of them",
        )
    return found


def _learning_rates(
    store: Store, run: str, at: Sequence[str], lrs: Sequence[float] | None
) -> list[float]:
    if lrs is not None:
        if len(lrs) != len(at):
            raise AttributionError(
                "one learning rate per checkpoint is needed",
                found=f"{len(lrs)} for {len(at)} checkpoints",
            )
        return [float(lr) for lr in lrs]
    known = {checkpoint.name: checkpoint.lr for checkpoint in store.checkpoints(run)}
    missing = [name for name in at if known.get(name) is None]
    if missing:
        raise AttributionError(
            f"tracin needs the learning rate at checkpoint {missing[0]!r}",
            fix="pass lrs=, or capture with gk.Weights(source, lr=...)",
        )
    return [float(known[name] or 0.0) for name in at]
