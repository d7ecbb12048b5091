"""The arrays of the current model id and experiment, under their released names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.compat.trak import _solved
from gradkeep.compat.trak._solved import Ridge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.compat.trak._kept import Kept
    from gradkeep.compat.trak._store_saver import MmapSaver


class Current(Mapping[str, Any]):
    """The arrays of the current model id and experiment, read when they are asked for.

    Rows that are not there are NaN, never a number. To write, use `put` and `put_targets`.
    """

    def __init__(self, saver: MmapSaver) -> None:
        self._saver = saver

    def __getitem__(self, name: str) -> Any:
        saver, model_id = self._saver, self._saver.current_model_id
        if model_id is None:
            return None
        found = saver.finalized(model_id)
        if name == "is_featurized":
            return saver.done().astype(np.int32).reshape(-1, 1)
        if name == "out_to_loss":
            return saver.train_weights(model_id).reshape(-1, 1)
        if name == "grads":
            return _with_gaps(saver._train(model_id))
        if name == "features":
            if isinstance(found, Ridge):
                parts = _solved.features_of(saver.train(model_id), found)
                return np.concatenate([part.numpy() for _, part in parts])
            return None if found is None else _with_gaps(found)
        exp_name = saver.current_experiment_name
        if exp_name is not None and name == f"{exp_name}_grads":
            return _with_gaps(saver._targets(exp_name, model_id))
        if exp_name is not None and name == f"{exp_name}_scores":
            return saver.scores(exp_name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from ("grads", "out_to_loss", "features", "is_featurized")
        if self._saver.current_experiment_name is not None:
            yield f"{self._saver.current_experiment_name}_grads"
            yield f"{self._saver.current_experiment_name}_scores"

    def __len__(self) -> int:
        return len(list(iter(self)))


def _with_gaps(kept: Kept) -> Any:
    out = np.full((kept.count, kept.dim), np.nan, np.float32)
    there = np.flatnonzero(kept.done)
    out[there] = kept.read(there).numpy()
    return out
