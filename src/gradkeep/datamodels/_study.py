"""A study: many models on random subsets of one dataset, their masks and outputs in a store."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import xxhash

import gradkeep.store as stores
from gradkeep import _arguments, farm
from gradkeep._arguments import Limits, NonNegativeInt, PositiveInt, checked
from gradkeep._budgets import parse_budget
from gradkeep.datamodels._masks import Masks, Subsets, check_alpha, draw_masks
from gradkeep.datamodels._removal import (
    VerifiedRemovals,
    control_sets,
    verify_removals,
)
from gradkeep.datamodels._result import open_store
from gradkeep.datamodels._spec import Output, tensors
from gradkeep.datamodels._training import (
    MANY,
    MASKS,
    WEIGHTS,
    RetrainJob,
    StudyJob,
    Training,
    floats,
    is_pair,
    load_dataset,
    restore_weights,
    stacks_well,
)
from gradkeep.datamodels._weights import checked_base, checked_ids
from gradkeep.errors import DatamodelsError, SchemaMismatchError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from gradkeep.capturing._report import Captured
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.datamodels._result import Datamodels
    from gradkeep.farm._run import Outcome
    from gradkeep.store import Rows, Store


_RESERVED = ("checkpoint", "checkpoints", "run", "split")
_RETRAINED = ".removals."
NumModels = Annotated[int, Limits(1, most=2**31 - 1)]
"""Stands between a study's name and the digest of the masks that were trained beside it."""


class Study:
    """Many models, each trained on its own random subset of a data set.

    Mask and seed of a model depend only on the study's seed and the model's number. Creating the same study again opens it; a larger `num_models` extends
    it; other settings are refused.

    Args:
        store: The store, or its path.
        dataset: Training data: a pair of tensors or arrays, a data set, or a function that loads one.
        train_fn: A `Training`, or a function of a subset and a seed that returns a trained model.
        num_models: Number of models.
        outputs: What to record of each model: `margins(test)` and the like, or a dict of them.
        alpha: Share of the examples in a subset.
        seed: Seed of the study.
        name: Name of the study in the store.
        subsets: `"fixed"` subset size, or `"independent"` draws.
        keep_models: Save the weights: True for a `Training`, otherwise a function that builds an untrained model.
        stacked: Train many models at a time; decided by a short trial by default.
        repeats: Models per subset, with different seeds; `ceiling` needs at least 2.
        memory_budget: Memory of a training step in bytes, or as a fraction; the models are equal to the bit.
        facts: Values stored with the study; opening it with others is refused.
        begin: Create the study in the store now; `retrain` does not need it.

    Example:
        >>> import tempfile, torch
        >>> from gradkeep.datamodels import margins
        >>> x, y = torch.eye(6), torch.tensor([0, 1, 0, 1, 0, 1])
        >>> training = Training(lambda: torch.nn.Linear(6, 2), epochs=2, batch_size=3)
        >>> study = Study(tempfile.mkdtemp(), (x, y), training, num_models=4,
        ...               outputs=margins((x, y)), stacked=False)
        >>> study.run(workers=0).complete, study.masks().shape, study.outputs().shape
        (True, (4, 6), (4, 6))
    """

    @checked(DatamodelsError)
    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        dataset: Any,
        train_fn: Callable[[Any, int], Any],
        *,
        num_models: NumModels,
        outputs: Output | Mapping[str, Output],
        alpha: float = 0.5,
        seed: NonNegativeInt = 0,
        name: str = "study",
        subsets: Subsets = "fixed",
        keep_models: bool | Callable[[], Any] = False,
        stacked: bool | None = None,
        repeats: PositiveInt = 1,
        memory_budget: float | str | None = None,
        facts: Mapping[str, str | int | float | bool] | None = None,
        begin: bool = True,
    ) -> None:
        self.store = open_store(store)
        self.name = name
        data = load_dataset(dataset)
        count = count_of(data)
        check_alpha(alpha, num_examples=count)
        named_outputs = dict(outputs) if isinstance(outputs, Mapping) else {"outputs": outputs}
        for key, one in named_outputs.items():
            _arguments.text("a name in outputs", key, error=DatamodelsError)
            _arguments.instance(f"outputs[{key!r}]", one, Output, error=DatamodelsError)
        self._blank = _blank(train_fn, keep_models)
        self.job = StudyJob(
            dataset,
            train_fn,
            named_outputs,
            count,
            alpha,
            subsets,
            seed,
            bool(keep_models),
            stacked=False,
            repeats=repeats,
            memory_budget=None if memory_budget is None else parse_budget(memory_budget),
        )
        self.job.stacked = self._choose(data, stacked)
        self.schema = self._schema(data, facts or {})
        self._num_models = num_models
        if begin:
            _ = self.rows

    @functools.cached_property
    def rows(self) -> Rows:
        """Rows of the models in the store, created on first use."""
        try:
            rows = self.store.rows(self.name, self.schema)
        except SchemaMismatchError as error:
            raise SchemaMismatchError(
                "the study exists with other settings; nothing was changed",
                path=error.path,
                found=error.found,
                fix="Make it as before, or give the new one another name.",
            ) from None
        if self._num_models > rows.num_rows:
            rows.grow(self._num_models)
        return rows

    @checked(DatamodelsError)
    def run(self, *, workers: int | None = None, **options: Any) -> Outcome:
        """Train the models that are missing.

        Args:
            workers: Number of worker processes; 0 trains in this process.
            **options: Options of `gradkeep.farm.run`.

        Returns:
            What was done and what failed.
        """
        if self.job.stacked:
            options.setdefault("batch", MANY)
        return farm.run(self.store, self.name, self.job, workers=workers, **options)

    @checked(DatamodelsError)
    def grow(self, num_models: NumModels) -> None:
        """Extend the study.

        Args:
            num_models: New number of models.
        """
        self.rows.grow(num_models)

    def done(self) -> AnyArray:
        """Return the numbers of the trained models, sorted `[m]`."""
        return self.rows.done()

    @checked(DatamodelsError)
    def masks(self, models: Sequence[int] | None = None) -> Masks:
        """Return the subsets of models.

        Args:
            models: Numbers of the models; all trained ones by default.

        Returns:
            Their masks.
        """
        return Masks.of(self._read(models, MASKS))

    @checked(DatamodelsError)
    def outputs(self, name: str | None = None, models: Sequence[int] | None = None) -> AnyArray:
        """Return the outputs of models.

        Args:
            name: Name of the output, if there are several.
            models: Numbers of the models; all trained ones by default.

        Returns:
            Outputs `[m, *shape]`.
        """
        return self._read(models, self._output(name))

    @checked(DatamodelsError)
    def ceiling(self, output: str | None = None) -> AnyArray:
        """Estimate the largest correlation with an output that subsets can explain.

        sqrt(1 - W / V), with W the variance among models of one subset and V that of all models. Needs `repeats` of at least 2.

        Args:
            output: Name of the output, if there are several.

        Returns:
            Ceilings `[t]`.
        """
        done = self.done()
        subset = done // self.job.repeats
        whole = np.flatnonzero(np.bincount(subset) == self.job.repeats) if len(done) else subset
        if self.job.repeats < 2 or len(whole) < 2:
            raise DatamodelsError(
                "the ceiling needs several models per subset",
                code="datamodels.ceiling_needs_repeats",
                found=f"repeats={self.job.repeats}, {len(whole)} such subsets are done",
                fix="Make the study with repeats=2 or more, under another name, and run it.",
            )
        rows = (whole[:, None] * self.job.repeats + np.arange(self.job.repeats)).ravel()
        values = self.outputs(output, models=rows.tolist()).astype(np.float64)
        values = values.reshape(len(whole), self.job.repeats, -1)
        within = values.var(axis=1, ddof=1).mean(axis=0)
        everything = values.reshape(len(rows), -1).var(axis=0, ddof=1)
        share = np.divide(within, everything, out=np.ones_like(within), where=everything > 0)
        return np.asarray(np.sqrt(np.clip(1 - share, 0, 1)))

    @checked(DatamodelsError)
    def model(self, index: int) -> Any:
        """Load a trained model; the study must have `keep_models`.

        Args:
            index: Number of the model.

        Returns:
            The model with its weights.
        """
        if self._blank is None:
            raise DatamodelsError(
                "the study does not save its models",
                code="datamodels.models_not_saved",
                fix="Make it with keep_models=True.",
            )
        flat = self.rows.read([index], [WEIGHTS])[WEIGHTS][0]
        return restore_weights(self._blank(), np.asarray(flat))

    @checked(DatamodelsError)
    def capture(
        self,
        test: Any = None,
        *,
        models: Sequence[int] | None = None,
        task: Task | None = None,
        output: str | None = None,
        batch_size: int = 256,
        **options: Any,
    ) -> list[Captured]:
        """Capture the gradients of trained models on the training examples and on `test`.

        Each model is a checkpoint named by its number, in the run named after the study, with the splits `train` (row i is column i of the masks) and
        `test`. Needs `keep_models`; resumes.

        Args:
            test: Query examples; those of the output by default.
            models: Numbers of the models; all trained ones by default.
            task: Task of the capture; classification by default.
            output: Name of the output, if there are several.
            batch_size: Rows per batch.
            **options: Options of `gradkeep.capture`.

        Returns:
            The captures.
        """
        queries = self.job.outputs[self._output(output)].examples if test is None else test
        if queries is None:
            raise DatamodelsError(
                "the output has no query examples",
                code="datamodels.output_without_examples",
                fix="Pass them as test=.",
            )
        from gradkeep.capturing._capture import capture
        from gradkeep.capturing._report import Captured
        from gradkeep.capturing.tasks._tasks import Classification

        taken = [name for name in _RESERVED if name in options]
        if taken:
            raise DatamodelsError(
                "these options are set by the study",
                code="datamodels.reserved_option",
                found=", ".join(taken),
                expected="the model's number as checkpoint, the study's name as run",
            )
        splits = {"train": self.job.data(), "test": queries}
        examples = {split: _as_dataset(data) for split, data in splits.items()}
        captured: list[Captured] = []
        for index in self.done().tolist() if models is None else models:
            model = self.model(index)
            for split, data in examples.items():
                result = capture(
                    self.store,
                    model,
                    data,
                    task=Classification() if task is None else task,
                    split=split,
                    checkpoints=str(index),
                    run=self.name,
                    batch_size=batch_size,
                    **{"progress": False, **options},
                )
                assert isinstance(result, Captured)
                captured.append(result)
        return captured

    @checked(DatamodelsError)
    def fit(self, output: str | None = None, **options: Any) -> Datamodels:
        """Fit datamodels to an output.

        Args:
            output: Name of the output, if there are several.
            **options: Options of `gradkeep.datamodels.fit`.

        Returns:
            The fitted datamodels.
        """
        from gradkeep.datamodels._fit import fit

        return fit(self.masks(), self.outputs(output), **options)

    @checked(DatamodelsError)
    def verify_removals(
        self,
        fitted: Datamodels,
        removals: Sequence[Any],
        *,
        output: str | None = None,
        base: Any = None,
        repeats: int = 1,
        control: bool = False,
        **options: Any,
    ) -> VerifiedRemovals:
        """Retrain with and without each set of examples and compare with the predictions.

        Like `gradkeep.datamodels.verify_removals`, with trainings run by the farm and saved in the store.

        Args:
            fitted: The datamodels.
            removals: Sets of example ids.
            output: Name of the output, if there are several.
            base: Mask `[n]` of the training set; all rows by default.
            repeats: Trainings per set.
            control: Also remove random sets of the same sizes.
            **options: Options of `run`.

        Returns:
            Predicted and measured changes.
        """
        job = self.job
        whole = checked_base(base, job.num_examples)
        sets = [checked_ids("examples", removed, job.num_examples) for removed in removals]
        if control:
            sets += control_sets([one[whole[one]] for one in sets], whole, seed=job.seed)
        masks = [whole]
        for removed in sets:
            mask = whole.copy()
            mask[removed] = False
            masks.append(mask)
        found_outputs = self.retrain(np.stack(masks), output=output, repeats=repeats, **options)
        answers = {
            (mask.tobytes(), repeat): found_outputs[place, repeat]
            for place, mask in enumerate(masks)
            for repeat in range(repeats)
        }
        return verify_removals(
            fitted,
            removals,
            lambda mask, seed: answers[np.asarray(mask, np.bool_).tobytes(), seed],
            base=whole,
            repeats=repeats,
            control=control,
            seed=job.seed,
        )

    @checked(DatamodelsError)
    def retrain(
        self, masks: Any, *, output: str | None = None, repeats: PositiveInt = 1, **options: Any
    ) -> AnyArray:
        """Train models on given masks.

        Every mask is trained with the same seeds, so that part of the noise cancels. Results are saved: a second call trains only what is missing. Costs
        K x repeats trainings.

        Args:
            masks: Masks `[K, n]`.
            output: Name of the output, if there are several.
            repeats: Trainings per mask.
            **options: Options of `run`.

        Returns:
            Outputs `[K, repeats, *shape]`.
        """
        output, packed = self._output(output), Masks.of(masks)
        if packed.num_examples != self.job.num_examples:
            raise DatamodelsError(
                "the masks are of another data set than the study",
                code="datamodels.other_examples",
                found=f"{packed.num_examples} columns",
                expected=self.job.num_examples,
            )
        alone = dataclasses.replace(
            self.job, keep_models=False, outputs={output: self.job.outputs[output]}
        )
        digest = xxhash.xxh3_64_hexdigest(packed.bits.tobytes() + output.encode())
        name, known = f"{self.name}{_RETRAINED}{digest}", self.schema
        arrays = (known.array(MASKS), known.array(output))
        schema = stores.Schema(arrays, fingerprints=known.fingerprints)
        rows = self.store.rows(name, schema, num_rows=len(packed) * repeats)
        if alone.stacked:
            options.setdefault("batch", MANY)
        outcome = farm.run(self.store, name, RetrainJob(alone, packed), **options)
        if not outcome.complete:
            why = [item.error.splitlines()[-1] for item in outcome.failures[:1]]
            raise DatamodelsError(
                "some trainings failed",
                code="datamodels.retraining_failed",
                path=rows.path,
                found="; ".join([str(outcome.progress), *why]),
            )
        values = rows.read(np.arange(len(packed) * repeats), [output])[output]
        by_repeat = np.asarray(values).reshape(repeats, len(packed), *values.shape[1:])
        return np.asarray(by_repeat.swapaxes(0, 1))

    def _read(self, models: Sequence[int] | None, name: str) -> AnyArray:
        indices = self.done() if models is None else np.asarray(models)
        return np.asarray(self.rows.read(indices, [name])[name])

    def _output(self, name: str | None) -> str:
        names = list(self.job.outputs)
        if name is None and len(names) == 1:
            return names[0]
        if name not in names:
            raise DatamodelsError(
                "the study has several outputs, or none of this name",
                code="datamodels.unknown_output",
                found=name,
                expected=" or ".join(names),
            )
        return name

    def _choose(self, data: Any, requested: bool | None) -> bool:
        """Decide whether to train many models at a time: as stored, as requested, or by a trial."""
        job = self.job
        possible = (
            isinstance(job.train_fn, Training)
            and job.subsets == "fixed"
            and job.memory_budget is None
            and all(output.of_logits is not None for output in job.outputs.values())
        )
        if requested and not possible:
            raise DatamodelsError(
                "these models cannot be trained stacked",
                code="datamodels.not_stackable",
                expected='a Training, subsets="fixed", outputs that follow from logits, no budget',
                fix="Leave out stacked=True.",
            )
        if not possible or requested is not None:
            return bool(requested)
        for begun in self.store.row_sets():
            # A study goes on as it began: then no row depends on who trained it.
            if begun == self.name or begun.startswith(f"{self.name}{_RETRAINED}"):
                return bool(self.store.rows(begun).schema.fingerprints.get("stacked"))
        assert isinstance(job.train_fn, Training)
        size = int(draw_masks(0, [0], num_examples=job.num_examples, alpha=job.alpha).sum())
        return stacks_well(job.train_fn, *tensors(data), size)

    def _schema(self, data: Any, facts: Mapping[str, Any]) -> stores.Schema:
        job = self.job
        arrays = [stores.Array(MASKS, "bool", (job.num_examples,), kind="mask", encoding="bits")]
        for name, output in job.outputs.items():
            arrays.append(stores.Array(name, output.dtype, output.shape, kind="data"))
        if self._blank is not None:
            weights = sum(value.numel() for value in floats(self._blank().state_dict()).values())
            arrays.append(stores.Array(WEIGHTS, "float32", (weights,), kind="data"))
        return stores.Schema(
            tuple(arrays),
            fingerprints={
                **facts,
                "alpha": job.alpha,
                "data": fingerprint_of(data),
                "seed": job.seed,
                "stacked": job.stacked,
                "subsets": job.subsets,
                "training": describe(job.train_fn),
                **({"repeats": job.repeats} if job.repeats > 1 else {}),
            },
        )


def _blank(train_fn: Any, keep: bool | Callable[[], Any]) -> Callable[[], Any] | None:
    if keep is False:
        return None
    if keep is not True:
        return keep
    if not isinstance(train_fn, Training):
        raise DatamodelsError(
            "keep_models needs a function that builds an untrained model",
            code="datamodels.untrained_model",
            fix="Give keep_models a function that returns one.",
        )
    return train_fn.model


def count_of(data: Any) -> int:
    """How many examples there are, in a dataset or a pair of inputs and labels."""
    try:
        return len(data[1]) if is_pair(data) else len(data)
    except TypeError:
        raise _arguments.argument_error(
            "dataset",
            data,
            error=DatamodelsError,
            expected="a dataset with a length, or inputs [N, ...] and labels [N]",
        ) from None


def fingerprint_of(data: Any) -> str:
    """A digest of the examples in memory; of anything else, their number."""
    digest = xxhash.xxh3_128()
    values = [getattr(data, name, None) for name in ("inputs", "labels")]
    parts = values if all(hasattr(part, "shape") for part in values) else data
    if not isinstance(parts, tuple | list) or not all(hasattr(part, "shape") for part in parts):
        return f"{len(data)} examples"
    for part in parts:
        digest.update(np.ascontiguousarray(np.asarray(part)).tobytes())
    return digest.hexdigest()


def describe(train_fn: Any) -> str:
    """The training in words; of a function, its name."""
    if isinstance(train_fn, Training):
        return train_fn.describe()
    return str(getattr(train_fn, "__qualname__", type(train_fn).__qualname__))


def _as_dataset(data: Any) -> Any:
    """Return the examples in order, so that a row's id is its column in the masks."""
    from torch.utils.data import TensorDataset

    return TensorDataset(*tensors(data)) if is_pair(data) else data
