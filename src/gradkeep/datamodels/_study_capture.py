"""Gradients of a study's models: what is kept of each is replayed and captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep.datamodels._outputs import tensors
from gradkeep.datamodels._study_facts import is_pair
from gradkeep.errors import StudyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradkeep.capturing import Captured, Task
    from gradkeep.datamodels._study import Study

_RESERVED = ("checkpoint", "run", "split")


def capture_models(
    study: Study,
    splits: Mapping[str, Any],
    *,
    models: Sequence[int] | None,
    task: Task | None,
    batch_size: int,
    **options: Any,
) -> list[Captured]:
    """Capture every split at every model, each model read back from the store once."""
    from gradkeep.capturing import Captured, Classification, capture

    taken = [name for name in _RESERVED if name in options]
    if taken:
        raise StudyError(
            "the study itself names what it captures",
            found=", ".join(taken),
            expected="the model's number as checkpoint, the study's name as run",
        )
    loaders = {split: _loader(data, batch_size) for split, data in splits.items()}
    kept: list[Captured] = []
    for index in study.done().tolist() if models is None else models:
        model = study.model(index)
        for split, loader in loaders.items():
            found = capture(
                study.store,
                model,
                loader,
                task=Classification() if task is None else task,
                split=split,
                checkpoints=str(index),
                run=study.name,
                **{"mode": "eval", "progress": False, **options},
            )
            assert isinstance(found, Captured)
            kept.append(found)
    return kept


def _loader(data: Any, batch_size: int) -> Any:
    """All examples in their order: a row's id is its place in the masks."""
    from torch.utils.data import DataLoader, TensorDataset

    examples = TensorDataset(*tensors(data)) if is_pair(data) else data
    return DataLoader(examples, batch_size=batch_size)
