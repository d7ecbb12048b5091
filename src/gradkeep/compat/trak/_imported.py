"""Import the results of the released package from a save_dir."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np

import gradkeep.store as gs
from gradkeep.attribution._scores import Scores
from gradkeep.errors import AttributionError
from gradkeep.factors._dense import Dense
from gradkeep.factors._form import Parameter, form_to_fields

if TYPE_CHECKING:
    import os

_ID = re.compile(r"id_(-?\d+)\.json")
_ROWS = 4096
_SAFE = re.compile(r"(?!\.)[^/\\\0]{1,200}")
"""Name of an experiment that is a valid beginning of a file name."""
_MAX_JSON_BYTES = 64 << 20


T = TypeVar("T")
_Count = Annotated[int, msgspec.Meta(ge=1, lt=2**62)]


class _Metadata(msgspec.Struct):
    rows: _Count = msgspec.field(name="train set size")
    dim: _Count = msgspec.field(name="JL dimension")


class _Experiment(msgspec.Struct):
    num_targets: _Count
    scores_finalized: bool | int = False


@dataclass(frozen=True, slots=True)
class ImportedScores:
    """Imported results.

    Attributes:
        checkpoints: Model ids whose projected gradients are now captures, such as `id_0`.
        scores: Experiments whose scores are now saved scores.
        skipped: Incomplete results, with reasons.
    """

    checkpoints: tuple[str, ...]
    scores: tuple[str, ...]
    skipped: tuple[str, ...]


def import_save_dir(
    save_dir: str | os.PathLike[str],
    store: gs.Store | str | os.PathLike[str],
    *,
    run: str = "trak",
) -> ImportedScores:
    """Bring the results of the released TRAK package into a store.

    Every featurized model id becomes a capture of the split `train`: `projection` `[k]`, the
    projected gradient of the output, and `slope`, the slope of the loss (minus `weight`, which
    TRAK keeps). Every experiment becomes a capture of its targets under its name, whose loss is
    minus the output. Both answer `gk.gradients` and `gk.attribute(store, queries=NAME, run="trak")`.
    Saved scores become `Scores` `[targets, train]`, the transpose of the released file. Files are
    mapped, never unpickled.

    Args:
        save_dir: Folder that a `TRAKer` of the released package saved to.
        store: Where to put the results.
        run: The run that the captures belong to.

    Returns:
        What was imported, and what was skipped because it is incomplete.
    """
    folder = Path(save_dir)
    about = _read_json(folder / "metadata.json", dict[str, Any])
    metadata = _read_json(folder / "metadata.json", _Metadata)
    opened = store if isinstance(store, gs.Store) else gs.open(store)
    rows, dim = metadata.rows, metadata.dim
    ids = sorted(int(m[1]) for p in folder.glob("id_*.json") if (m := _ID.fullmatch(p.name)))
    experiments = folder / "experiments.json"
    done: list[str] = []
    skipped: list[str] = []
    named = {}
    known = _read_json(experiments, dict[str, _Experiment]) if experiments.exists() else {}
    for name, fields in known.items():
        # The names come from an untrusted file.
        if _SAFE.fullmatch(name) is None:
            skipped.append(f"experiment {name[:100]!a}: not the name of a file in this folder")
        else:
            named[name] = fields
    for number in ids:
        try:
            _import_model(opened, folder / str(number), number, rows, dim, run, about)
            done.append(f"id_{number}")
        except _IncompleteError as error:
            skipped.append(f"model id {number}: {error}")
        for name, fields in named.items():
            path = folder / str(number) / f"{name}_grads.mmap"
            if path.exists():
                values = _open_array(path, (fields.num_targets, dim))
                key = gs.CaptureKey(f"id_{number}", _name(name), run)
                # Queries are gradients of the output, as if the loss were minus the output.
                slope = np.full(len(values), -1.0, np.float32)
                _write(opened, key, {"projection": values, "slope": slope}, about)
    scored = []
    for name, fields in named.items():
        # The stored path may be outdated if the folder was moved.
        path = folder / "scores" / f"{name}.mmap"
        if not fields.scores_finalized or not path.exists():
            skipped.append(f"scores {name}: not finalized")
            continue
        values = _open_array(path, (rows, fields.num_targets))
        turned = np.asarray(values, np.float32).T
        named_ids = tuple(f"id_{number}" for number in ids)
        as_scores(turned, _name(name), named_ids, "as imported").save(_name(name), store=opened)
        scored.append(_name(name))
    return ImportedScores(tuple(done), tuple(scored), tuple(skipped))


def as_scores(values: Any, queries: str, checkpoints: tuple[str, ...], scale: str) -> Scores:
    """Build `Scores` `[m, n]` from scores of TRAK."""
    return Scores(
        values=values,
        query_ids=np.arange(values.shape[0]),
        train_ids=np.arange(values.shape[1]),
        method="trak",
        queries=queries,
        checkpoints=checkpoints,
        scale=f"TRAK, {scale}",
        exact=False,
        approximate="gradients projected",
    )


class _IncompleteError(Exception):
    pass


def _import_model(
    store: gs.Store, folder: Path, number: int, rows: int, dim: int, run: str, about: Any
) -> None:
    flags = _open_array(folder / "_is_featurized.mmap", None)
    if int((np.asarray(flags) == 1).sum()) != rows:
        raise _IncompleteError(
            f"{int((np.asarray(flags) == 1).sum())} of {rows} rows are featurized"
        )
    grads = folder / "grads.mmap"
    if not grads.exists():
        raise _IncompleteError("its gradients were deleted")
    weight = _open_array(folder / "out_to_loss.mmap", (rows, 1)).reshape(-1)
    # TRAK keeps 1 - p: minus the slope of the loss at the output.
    arrays = {"projection": _open_array(grads, (rows, dim)), "weight": weight, "slope": -weight}
    _write(store, gs.CaptureKey(f"id_{number}", "train", run), arrays, about)


def _write(store: gs.Store, key: gs.CaptureKey, arrays: dict[str, Any], about: Any) -> None:
    count, dim = arrays["projection"].shape
    form = Dense((Parameter("projection", (dim,)),), "projection", dim, sketch=True)
    schema = gs.Schema(
        tuple(
            gs.Array(
                name,
                shape=values.shape[1:],
                kind="data" if values.ndim == 1 else "projection",
                layer=None if values.ndim == 1 else "projection",
            )
            for name, values in arrays.items()
        ),
        num_rows=count,
        layers=(gs.Layer("projection", "Projection", dim, form_to_fields(form)),),
        fingerprints={
            **{f"trak {name}": str(value) for name, value in about.items()},
            "of": "output",
        },
    )
    with store.write(key, schema) as writer:
        for start in range(0, count, _ROWS):
            part = slice(start, min(start + _ROWS, count))
            ids = np.arange(part.start, part.stop)
            values = {name: np.asarray(array[part], np.float32) for name, array in arrays.items()}
            writer.append(ids, values)


def _open_array(path: Path, shape: tuple[int, ...] | None) -> Any:
    if not path.resolve().is_relative_to(path.parent.parent.resolve()):
        raise AttributionError(
            "the file is a link out of the folder and was not read",
            code="compat.link_out",
            path=path,
            found=path.resolve(),
            fix="Replace the link by the file.",
        )
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise AttributionError(
            "the array cannot be read",
            code="compat.array_unreadable",
            path=path,
            found=str(error).splitlines()[0],
        ) from error
    if shape is not None and values.shape != shape:
        raise AttributionError(
            "the array has another shape than the metadata",
            code="compat.array_shape",
            path=path,
            found=values.shape,
            expected=shape,
        )
    return values


def _read_json(path: Path, kind: type[T]) -> T:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise AttributionError(
            "the folder has no TRAK results",
            code="compat.no_results",
            path=path.parent,
            expected=f"a folder with {path.name}, written by TRAKer(save_dir=...)",
        ) from None
    except (ValueError, RecursionError) as error:
        raise AttributionError(
            "the file is truncated, or not one of TRAK's",
            code="compat.not_trak",
            path=path,
            found=str(error)[:200],
            fix="Restore it from a copy, or featurize again.",
        ) from error


def _name(exp_name: str) -> str:
    """Convert an experiment's name to one that a store accepts."""
    return re.sub(r"[^A-Za-z0-9._+=@-]", "-", exp_name).lstrip(".+=@-") or "experiment"
