"""Scores in a store: a block of queries, and a block of the training rows they are about."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep.attribution._accumulator import zeros_on_disk_or_in_memory
from gradkeep.errors import AttributionError, MissingRowsError, NotSealedError
from gradkeep.store import Array, Schema, ScoresKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.attribution._scores import Scores
    from gradkeep.store import Block, Store

_TOLD = ("method", "queries", "train", "scale", "exact", "approximate", "options", "chosen")
_LISTED = ("checkpoints", "layers")


def save_scores(store: Store, name: str, scores: Scores) -> None:
    """Write scores under a name; the queries' block is finished last, and only then they are there."""
    key = _key(name)
    told: dict[str, Any] = {part: getattr(scores, part) for part in _TOLD}
    told |= {part: json.dumps(getattr(scores, part)) for part in _LISTED}
    if scores.solved is not None:
        told["solved"] = scores.solved
    if scores.chosen_on:
        told["chosen_on"] = " ".join(scores.chosen_on)
    if scores.captures:
        told["captures"] = json.dumps(dict(scores.captures), sort_keys=True)
    told["digest"] = _digest(scores)
    rows_scored = {"row": np.arange(len(scores.train_ids)), **_label(scores.train_labels)}
    train = Schema(
        tuple(Array(part, str(values.dtype)) for part, values in rows_scored.items()),
        num_rows=len(scores.train_ids),
        fingerprints=told,
    )
    with store.write(key.train, train) as writer:
        writer.append(scores.train_ids, rows_scored)
    beside = _label(scores.query_labels)
    if scores.confidence is not None:
        beside["confidence"] = scores.confidence
    arrays = [Array("score", shape=(scores.shape[1],), kind="data")]
    arrays += [Array(part, str(values.dtype)) for part, values in beside.items()]
    layers = 0 if scores.per_layer is None else len(scores.per_layer)
    if layers:
        arrays.append(Array("per_layer", shape=(layers, scores.shape[1]), kind="data"))
    schema = Schema(tuple(arrays), num_rows=scores.shape[0], fingerprints=told)
    with store.write(key, schema) as writer:
        step = max(1, schema.rows_per_segment // 4)
        for start in range(0, scores.shape[0], step):
            rows = slice(start, start + step)
            values: dict[str, Any] = {"score": scores.values[rows]}
            values |= {part: whole[rows] for part, whole in beside.items()}
            if scores.per_layer is not None:
                values["per_layer"] = np.moveaxis(scores.per_layer[:, rows], 0, 1)
            if writer.needs(len(values["score"])):
                writer.append(scores.query_ids[rows], values)
            else:
                writer.skip(scores.query_ids[rows])


def check_free(store: Store, name: str, *, method: str, checkpoints: tuple[str, ...]) -> None:
    """Raise if scores of another method or other checkpoints have that name, before any work."""
    key = _key(name)
    if not store.has(key):
        return
    told = store.read(key, live=True).schema.fingerprints
    asked = {"method": method, "checkpoints": json.dumps(checkpoints)}
    _require_current(store, name, told)
    other = [f"{part}: {told.get(part)!r}" for part in asked if told.get(part) != asked[part]]
    if other:
        raise AttributionError(
            f"other scores are saved as {name!r}",
            path=store.location,
            found=", ".join(other),
            fix="use another name, or delete them first",
        )


def _key(name: str) -> ScoresKey:
    """That of scores which can be read back by this name."""
    key = ScoresKey(name)
    if key.names_rows:
        raise AttributionError(
            f"scores cannot be saved as {name!r}",
            fix="use another name",
        )
    return key


def load_scores(store: Store, name: str, kind: type[Scores], ids: Any = None) -> Scores:
    """Read scores back, of all queries or of some."""
    known = sorted(k.name for k in store.scores() if not k.names_rows)
    if name not in known:
        raise AttributionError(
            f"no scores {name!r}",
            path=store.location,
            found=", ".join(known) or "no saved scores",
            fix="gk.attribute(store, ..., save=NAME) keeps them",
        )
    try:
        block = store.read(ScoresKey(name))
    except NotSealedError as error:
        raise AttributionError(
            f"the scores {name!r} were not written to the end",
            path=error.path,
            fix="save them again: it goes on where it stopped",
        ) from error
    if "digest" not in block.schema.fingerprints:
        raise AttributionError(
            f"{name!r} was not saved by Scores.save", fix="read it with store.read(ScoresKey(...))"
        )
    _require_current(store, name, block.schema.fingerprints)
    train = store.read(ScoresKey(name).train)
    told: Any = block.schema.fingerprints
    queries, kept = _all_queries(block) if ids is None else _some_queries(block, ids)
    provenance: Any = {part: told[part] for part in _TOLD}
    provenance |= {part: tuple(json.loads(told[part])) for part in _LISTED}
    return kind(
        values=kept["score"],
        query_ids=queries,
        train_ids=train.ids,
        **provenance,
        solved=told.get("solved"),
        chosen_on=tuple(str(told.get("chosen_on", "")).split()),
        query_labels=kept.get("label"),
        train_labels=train.column("label") if "label" in train.names else None,
        confidence=kept.get("confidence"),
        per_layer=kept.get("per_layer"),
        captures=store.capture_identities(told),
        store=store,
    )


def _require_current(store: Store, name: str, fingerprints: Mapping[str, Any]) -> None:
    """Raise if a capture holds other rows than when these scores were computed."""
    method = fingerprints.get("method")
    again = f"gradkeep attribute {store.location} --method {method} --save {name}"
    store.require_current(ScoresKey(name), fingerprints, AttributionError, again)


def _all_queries(block: Block) -> tuple[Any, dict[str, Any]]:
    """The ids and arrays of all queries; large ones on disk."""
    shape = block.schema.array("score").shape
    found: dict[str, Any] = {"score": zeros_on_disk_or_in_memory((len(block), *shape))}
    if "per_layer" in block.names:
        layers = block.schema.array("per_layer").shape[0]
        found["per_layer"] = zeros_on_disk_or_in_memory((layers, len(block), *shape))
    for batch in block.stream(list(found)):
        rows = slice(batch.first_row, batch.first_row + len(batch.ids))
        found["score"][rows] = batch["score"]
        if "per_layer" in found:
            found["per_layer"][:, rows] = np.moveaxis(batch["per_layer"], 1, 0)
    small = [part for part in ("label", "confidence") if part in block.names]
    return block.ids, {**found, **{part: block.column(part) for part in small}}


def _some_queries(block: Block, ids: Any) -> tuple[Any, dict[str, Any]]:
    """The same of the queries with these ids; costs their bytes."""
    least = -_arguments.LARGEST
    wanted = _arguments.whole_numbers("ids", ids, error=AttributionError, least=least)
    try:
        batch = block.read(wanted)
    except MissingRowsError as error:
        raise AttributionError("no such query was scored", found=error.found) from error
    found: dict[str, Any] = {part: np.asarray(batch[part]) for part in block.names}
    if "per_layer" in found:
        found["per_layer"] = np.moveaxis(found["per_layer"], 1, 0)
    return batch.ids, found


def _digest(scores: Scores) -> str:
    """What tells these scores from others: without it, half of one set could be resumed with another."""
    import xxhash

    found = xxhash.xxh3_128()
    for part in (scores.query_ids, scores.train_ids, *scores.values):
        found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()


def _label(labels: Any) -> dict[str, Any]:
    return {} if labels is None else {"label": np.asarray(labels)}
