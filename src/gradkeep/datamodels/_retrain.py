"""Removals that a fit predicts, checked by trainings that the farm does and the store keeps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gradkeep import farm
from gradkeep.datamodels._draw import training_seed
from gradkeep.datamodels._ids import checked_base, checked_ids
from gradkeep.datamodels._masks import Masks
from gradkeep.datamodels._removal import Verified, verify_removals
from gradkeep.datamodels._study_job import MASKS, StudyJob
from gradkeep.errors import StudyError
from gradkeep.store import Array, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.datamodels._result import Datamodels
    from gradkeep.store import Store

AnyArray = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class RetrainJob:
    """Trains on given masks, all of them once, then all of them again with another seed."""

    job: StudyJob
    masks: Masks

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The masks and outputs of these trainings."""
        return [
            self.job.train_on(
                self.masks[[number % len(self.masks)]].numpy()[0],
                training_seed(self.job.seed, number // len(self.masks)),
            )
            for number in numbers
        ]


def verify_by_farm(
    store: Store,
    name: str,
    job: StudyJob,
    found: Datamodels,
    removals: Sequence[Any],
    *,
    output: str,
    base: Any,
    repeats: int,
    **options: Any,
) -> Verified:
    """Train the whole set and the set without each removal, then compare with the predictions."""
    whole = checked_base(base, job.num_examples)
    wanted = [whole]
    for removed in removals:
        mask = whole.copy()
        mask[checked_ids("examples", removed, job.num_examples)] = False
        wanted.append(mask)
    alone = dataclasses.replace(
        job, keep_models=False, stacked=False, outputs={output: job.outputs[output]}
    )
    retrain = RetrainJob(alone, Masks.of(np.stack(wanted)))
    known = store.rows(name).schema
    digest = xxhash.xxh3_64_hexdigest(retrain.masks.bits.tobytes() + output.encode())
    rows = store.rows(
        f"{name}.removals.{digest}",
        Schema(
            (
                Array(MASKS, "bool", (job.num_examples,), kind="mask", encoding="bits"),
                known.array(output),
            ),
            fingerprints=known.fingerprints,
        ),
        num_rows=len(wanted) * repeats,
    )
    outcome = farm.run(store, f"{name}.removals.{digest}", retrain, **options)
    if not outcome.complete:
        raise StudyError(
            "some of the trainings without these examples failed",
            path=rows.path,
            found=f"{outcome.progress}; {outcome.failures[0].error.splitlines()[-1]}"
            if outcome.failures
            else outcome.progress,
        )
    answers = {
        (mask.tobytes(), repeat): rows.read([repeat * len(wanted) + place], [output])[output][0]
        for place, mask in enumerate(wanted)
        for repeat in range(repeats)
    }
    return verify_removals(
        found,
        removals,
        lambda mask, seed: answers[np.asarray(mask, np.bool_).tobytes(), seed],
        base=whole,
        repeats=repeats,
    )
