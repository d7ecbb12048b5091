"""Save and load scores: a block of queries, and a block of the training row ids."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep.attribution._question import zeros_on_disk_or_in_memory
from gradkeep.errors import AttributionError, MissingRowsError, NotSealedError
from gradkeep.store import Array, Schema, ScoresKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.attribution._scores import Scores
    from gradkeep.store import Block, Store

_FIELDS = ("method", "queries", "train", "scale", "exact", "approximate", "options", "chosen")
_LIST_FIELDS = ("checkpoints", "layers")


def save_scores(store: Store, name: str, scores: Scores) -> None:
    """Write scores under a name; they become visible when the queries' block is sealed, last."""
    key = _key(name)
    fingerprints: dict[str, Any] = {part: getattr(scores, part) for part in _FIELDS}
    fingerprints |= {part: json.dumps(getattr(scores, part)) for part in _LIST_FIELDS}
    if scores.solved is not None:
        fingerprints["solved"] = scores.solved
    if scores.chosen_on:
        fingerprints["chosen_on"] = " ".join(scores.chosen_on)
    if scores.captures:
        fingerprints["captures"] = json.dumps(dict(scores.captures), sort_keys=True)
    fingerprints["digest"] = _digest(scores)
    rows_scored = {"row": np.arange(len(scores.train_ids)), **_label(scores.train_labels)}
    train = Schema(
        tuple(Array(part, str(values.dtype)) for part, values in rows_scored.items()),
        num_rows=len(scores.train_ids),
        fingerprints=fingerprints,
    )
    with store.write(key.train, train) as writer:
        writer.append(scores.train_ids, rows_scored)
    per_query = _label(scores.query_labels)
    if scores.confidence is not None:
        per_query["confidence"] = scores.confidence
    arrays = [Array("score", shape=(scores.shape[1],), kind="data")]
    arrays += [Array(part, str(values.dtype)) for part, values in per_query.items()]
    layers = 0 if scores.per_layer is None else len(scores.per_layer)
    if layers:
        arrays.append(Array("per_layer", shape=(layers, scores.shape[1]), kind="data"))
    schema = Schema(tuple(arrays), num_rows=scores.shape[0], fingerprints=fingerprints)
    with store.write(key, schema) as writer:
        step = max(1, schema.rows_per_segment // 4)
        for start in range(0, scores.shape[0], step):
            rows = slice(start, start + step)
            values: dict[str, Any] = {"score": scores.values[rows]}
            values |= {part: whole[rows] for part, whole in per_query.items()}
            if scores.per_layer is not None:
                values["per_layer"] = np.moveaxis(scores.per_layer[:, rows], 0, 1)
            if writer.needs(len(values["score"])):
                writer.append(scores.query_ids[rows], values)
            else:
                writer.skip(scores.query_ids[rows])


def check_free(store: Store, name: str, *, method: str, checkpoints: tuple[str, ...]) -> None:
    """Raise if scores of another method or of other checkpoints have that name, before any work."""
    key = _key(name)
    if not store.has(key):
        return
    stored = store.read(key, live=True).schema.fingerprints
    requested = {"method": method, "checkpoints": json.dumps(checkpoints)}
    _require_current(store, name, stored)
    other = [
        f"{part}: {stored.get(part)!r}" for part in requested if stored.get(part) != requested[part]
    ]
    if other:
        raise AttributionError(
            f"other scores are saved as {name!r}",
            code="attribute.name_taken",
            path=store.location,
            found=", ".join(other),
            fix="Use another name, or delete them first.",
        )


def _key(name: str) -> ScoresKey:
    """Return the key of scores; raise for names that could not be loaded."""
    key = ScoresKey(name)
    if key.names_rows:
        raise AttributionError(
            f"scores cannot be saved as {name!r}",
            code="attribute.invalid_name",
            fix="Use another name.",
        )
    return key


def load_scores(store: Store, name: str, kind: type[Scores], ids: Any = None) -> Scores:
    """Load scores of all queries, or of some."""
    known = sorted(k.name for k in store.scores() if not k.names_rows)
    if name not in known:
        raise AttributionError(
            f"there are no scores {name!r}",
            code="attribute.unknown_scores",
            path=store.location,
            found=", ".join(known) or "no saved scores",
            fix="Save scores with gk.attribute(store, ..., save=NAME).",
        )
    try:
        block = store.read(ScoresKey(name))
    except NotSealedError as error:
        raise AttributionError(
            f"the scores {name!r} are incomplete",
            code="attribute.incomplete_scores",
            path=error.path,
            fix="Save them again: writing resumes where it stopped.",
        ) from error
    if "digest" not in block.schema.fingerprints:
        raise AttributionError(
            f"{name!r} was not saved by Scores.save",
            code="attribute.foreign_scores",
            fix="Read it with store.read(ScoresKey(...)).",
        )
    _require_current(store, name, block.schema.fingerprints)
    train = store.read(ScoresKey(name).train)
    fingerprints: Any = block.schema.fingerprints
    queries, arrays = _all_queries(block) if ids is None else _some_queries(block, ids)
    provenance: Any = {part: fingerprints[part] for part in _FIELDS}
    provenance |= {part: tuple(json.loads(fingerprints[part])) for part in _LIST_FIELDS}
    return kind(
        values=arrays["score"],
        query_ids=queries,
        train_ids=train.ids,
        **provenance,
        solved=fingerprints.get("solved"),
        chosen_on=tuple(str(fingerprints.get("chosen_on", "")).split()),
        query_labels=arrays.get("label"),
        train_labels=train.column("label") if "label" in train.names else None,
        confidence=arrays.get("confidence"),
        per_layer=arrays.get("per_layer"),
        captures=store.capture_identities(fingerprints),
        store=store,
    )


def _require_current(store: Store, name: str, fingerprints: Mapping[str, Any]) -> None:
    """Raise if a capture holds other rows than when these scores were computed."""
    method = fingerprints.get("method")
    command = f"gradkeep attribute {store.location} --method {method} --save {name}"
    store.require_current(ScoresKey(name), fingerprints, AttributionError, command)


def _all_queries(block: Block) -> tuple[Any, dict[str, Any]]:
    """Read the ids and arrays of all queries; large arrays are put on disk."""
    shape = block.schema.array("score").shape
    arrays: dict[str, Any] = {"score": zeros_on_disk_or_in_memory((len(block), *shape))}
    if "per_layer" in block.names:
        layers = block.schema.array("per_layer").shape[0]
        arrays["per_layer"] = zeros_on_disk_or_in_memory((layers, len(block), *shape))
    for batch in block.stream(list(arrays)):
        rows = slice(batch.first_row, batch.first_row + len(batch.ids))
        arrays["score"][rows] = batch["score"]
        if "per_layer" in arrays:
            arrays["per_layer"][:, rows] = np.moveaxis(batch["per_layer"], 1, 0)
    small = [part for part in ("label", "confidence") if part in block.names]
    return block.ids, {**arrays, **{part: block.column(part) for part in small}}


def _some_queries(block: Block, ids: Any) -> tuple[Any, dict[str, Any]]:
    """Read the ids and arrays of the queries with these ids; costs their bytes."""
    least = -_arguments.LARGEST
    query_ids = _arguments.whole_numbers("ids", ids, error=AttributionError, least=least)
    try:
        batch = block.read(query_ids)
    except MissingRowsError as error:
        raise AttributionError(
            "the scores do not have this query", code="attribute.unknown_query", found=error.found
        ) from error
    arrays: dict[str, Any] = {part: np.asarray(batch[part]) for part in block.names}
    if "per_layer" in arrays:
        arrays["per_layer"] = np.moveaxis(arrays["per_layer"], 1, 0)
    return batch.ids, arrays


def _digest(scores: Scores) -> str:
    """Compute a digest of the scores, so that a partial save is not resumed with other scores."""
    import xxhash

    digest = xxhash.xxh3_128()
    for part in (scores.query_ids, scores.train_ids, *scores.values):
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _label(labels: Any) -> dict[str, Any]:
    return {} if labels is None else {"label": np.asarray(labels)}
