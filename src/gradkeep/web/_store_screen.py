"""The screens Runs, Store and Evaluation: contents, sizes, accuracies, health and saved figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._display import pick_fields
from gradkeep.errors import GradkeepError
from gradkeep.web._http import error_problem

if TYPE_CHECKING:
    from gradkeep.evaluate import Evaluation
    from gradkeep.store import Verdict
    from gradkeep.store.catalog._scan import BlockFacts
    from gradkeep.web._served import ServedStore


def show_store(served: ServedStore) -> dict[str, Any]:
    """Return everything that the store holds, with sizes and ratios to dense gradients."""
    info = served.info()
    blocks = (*info.captures, *info.moments, *info.bases, *info.scores, *info.evaluations)
    return {
        **pick_fields(info, "location", "uuid", "bytes", "dense_bytes", "ratio"),
        "blocks": [_block_view(block) for block in blocks],
        "row_sets": [
            {
                "name": row_set.facts.address.name,
                **pick_fields(row_set, "done", "leased", "failed", "pending"),
                "bytes": row_set.facts.data_bytes,
                "problem": row_set.facts.problem,
            }
            for row_set in info.row_sets
        ],
    }


def show_health(served: ServedStore) -> dict[str, Any]:
    """Return the result of the last `verify`."""
    return _verify(served, start=False)


def verify_store(served: ServedStore) -> dict[str, Any]:
    """Verify every byte of the store again."""
    served.tasks.forget("verify")
    return _verify(served, start=True)


def _verify(served: ServedStore, *, start: bool) -> dict[str, Any]:
    def compute(report: Any) -> Verdict:
        from gradkeep.store import verify

        return verify(served.location, progress=report)

    verdict = served.tasks.get(
        "verify", "verifying every byte of the store", compute, lane="long", start=start
    )
    return {
        **pick_fields(verdict, "healthy", "files", "bytes"),
        "damage": [{"path": one.path, "what": one.what} for one in verdict.damage[:200]],
        "damaged": len(verdict.damage),
        "orphans": len(verdict.orphans),
        "unknown": len(verdict.unknown),
    }


def list_runs(served: ServedStore) -> dict[str, Any]:
    """Return every run with its checkpoints, sizes, losses and accuracies."""
    runs = []
    for run in served.info().runs:
        captures = [one for checkpoint in run.checkpoints for one in checkpoint.captures]
        names = sorted({one.address.name for one in captures}, key=lambda n: (n != "main", n))
        splits = sorted({str(one.address.split) for one in captures}, key=_split_order)
        dense = sum(one.dense_bytes for one in captures if one.ratio is not None)
        stored = sum(one.data_bytes for one in captures if one.ratio is not None)
        fingerprints = next((one.fingerprints for one in captures if one.fingerprints), {})
        runs.append(
            {
                "name": run.name,
                "captures": names,
                "splits": splits,
                "checkpoints": len(run.checkpoints),
                "rows": {
                    split: max(one.rows for one in captures if one.address.split == split)
                    for split in splits
                },
                "bytes": sum(one.bytes for one in captures),
                "ratio": dense / stored if stored else None,
                "modified": max((one.modified for one in captures), default=0.0),
                "config": {} if run.record is None else dict(run.record.config or {}),
                "model": _text(fingerprints.get("model")),
                "task": _text(fingerprints.get("task")),
                "unfinished": sum(one.state != "sealed" for one in captures),
                "points": _checkpoint_metrics(served, run.name, names, splits),
                "queries": next((split for split in splits if split != "train"), None),
                "train": "train" if "train" in splits else next(iter(splits), None),
                "problem": None if run.record is None else run.record.problem,
            }
        )
    return {"runs": runs}


def _checkpoint_metrics(
    served: ServedStore, run: str, names: list[str], splits: list[str]
) -> list[dict[str, Any]]:
    """Return mean loss and accuracy at every checkpoint of every split."""
    steps = {
        (known.name, one.name): None if one.record is None else one.record.step
        for known in served.info().runs
        for one in known.checkpoints
    }
    points: list[dict[str, Any]] = []
    for split in splits if names else ():
        for checkpoint in served.checkpoints(run, names[0], split):
            try:
                table = served.table(run, split, names[0], checkpoint)
            except GradkeepError:
                continue  # the Store screen shows the problem
            columns, loss, accuracy = table.columns, None, None
            if len(columns.get("loss", ())):
                loss = float(np.mean(columns["loss"]))
            if "label" in columns and "predicted" in columns and len(table.ids):
                accuracy = float(np.mean(columns["label"] == columns["predicted"]))
            points.append(
                {
                    "checkpoint": checkpoint,
                    "step": steps.get((run, checkpoint)),
                    "split": split,
                    "rows": len(table.ids),
                    "loss": loss,
                    "accuracy": accuracy,
                }
            )
    return points


def _block_view(block: BlockFacts) -> dict[str, Any]:
    address = block.address
    return {
        "kind": address.word,
        **pick_fields(address, "name", "run", "checkpoint", "split"),
        **pick_fields(block, "state", "problem", "bytes", "dense_bytes", "ratio", "modified"),
        "rows": block.rows + block.unsealed_rows,
        "wanted": block.num_rows,
        "keep": _text(block.fingerprints.get("kept")),
        "layers": [
            pick_fields(layer, "name", "type", "parameters", "row_bytes", "dense_row_bytes")
            for layer in block.layers
        ],
    }


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _split_order(split: str) -> tuple[bool, bool, str]:
    """Sort training rows first, then the usual query splits."""
    return split != "train", split not in ("test", "valid", "validation", "queries"), split


def list_evaluations(served: ServedStore) -> dict[str, Any]:
    """Return every saved evaluation, and the problems of those that cannot be read."""
    versions = tuple((one.address.name, one.version) for one in served.info().evaluations)

    def compute(_: Any) -> dict[str, Any]:
        from gradkeep.evaluate import Evaluation

        evaluations, problems = [], []
        for name, _version in versions:
            try:
                evaluations.append(evaluation_view(name, Evaluation.load(served.store, name)))
            except GradkeepError as error:
                problems.append(error_problem(error))
        return {"evaluations": evaluations, "problems": problems}

    return served.tasks.get(
        ("evaluations", versions),
        "reading evaluations",
        compute,
        size=lambda answer: 4096 * (1 + len(answer["evaluations"])),
        timeout=5.0,
    )


def find_lds(served: ServedStore, method: str) -> dict[str, Any] | None:
    """Return the saved LDS of a method on the most queries, if there is one."""
    views = [
        view
        for view in list_evaluations(served)["evaluations"]
        if view["metric"].lower().startswith("lds") and view["subject"].split(" ")[0] == method
    ]
    return max(views, key=lambda view: sum(view["items"]), default=None)


def evaluation_view(name: str, evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as the page shows it; `items` is a histogram over queries."""
    items = np.asarray(evaluation.items, np.float64)
    items = items[np.isfinite(items)]
    low, high = (float(items.min()), float(items.max())) if len(items) else (0.0, 0.0)
    counts, _ = np.histogram(
        items, bins=24, range=(low, high) if high > low else (low - 1, low + 1)
    )
    curve = evaluation.curve
    return {
        "name": name,
        **pick_fields(evaluation, "metric", "subject", "value", "level", "ceiling", "truth"),
        "low": None if evaluation.interval is None else evaluation.interval[0],
        "high": None if evaluation.interval is None else evaluation.interval[1],
        "sizes": str(evaluation.sizes),
        "provenance": evaluation.provenance,
        "items": counts.tolist(),
        "item_range": (low, high),
        "curve": curve and pick_fields(curve, "along", "at", "names", "values"),
    }
