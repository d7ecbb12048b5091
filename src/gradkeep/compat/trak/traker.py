"""`TRAKer`: store projected gradients of checkpoints and compute scores."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.capturing._resume import fingerprint_weights
from gradkeep.compat.trak._abstract_saver import validate_experiment, validate_model_id
from gradkeep.compat.trak._features import (
    Ridge,
    add_features,
    add_scores,
    describe_task,
    find_batch_rows,
    iter_features,
    load_task,
    require_inverse,
    select_parameters,
    select_samples,
)
from gradkeep.compat.trak._imported import as_scores
from gradkeep.compat.trak._saver_arrays import SaverArrays
from gradkeep.compat.trak._store_saver import find_stored_sketch
from gradkeep.compat.trak._traced import LayerTracer
from gradkeep.compat.trak.gradient_computers import FunctionalGradientComputer
from gradkeep.compat.trak.projectors import SketchProjector, sketch_type
from gradkeep.compat.trak.savers import MissingTargetsError, MmapSaver, ModelIDException
from gradkeep.compat.trak.utils import get_num_params

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from gradkeep.attribution._scores import Scores
    from gradkeep.compat.trak.gradient_computers import AbstractGradientComputer
    from gradkeep.compat.trak.modelout_functions import AbstractModelOutput
    from gradkeep.compat.trak.projectors import AbstractProjector
    from gradkeep.compat.trak.savers import AbstractSaver
    from gradkeep.compat.trak.score_computers import AbstractScoreComputer

    Ids = np.ndarray[Any, np.dtype[np.int64]]


@functools.cache
def _warn_default_ridge(logger: logging.Logger) -> None:
    """Warn once per process that default scores differ from the released package's."""
    logger.warning(
        "lambda_reg is not set: gradkeep adds a ridge of 1 x the mean diagonal, where the released "
        "package adds none, so the rankings of the two differ. Pass lambda_reg=0.0 for its "
        "scores; 'Coming from TRAK' in the documentation explains the benefit of the ridge."
    )


class TRAKer:
    """Score training rows for targets by TRAK, with the released package's names.

    Deliberate differences from the released package:

    - gradients are sketched from layer factors, without a random matrix; `projector` selects one;
    - `lambda_reg=None`, the default, adds 1 x the mean diagonal to the matrix that is inverted; a
      number is added as it is, with the released scale; 0 with `proj_dim >= train_set_size` raises;
    - gradients are durable when `featurize` and `score` return, and anything that would mix, lose or
      invent results raises.

    Args:
        model: The model.
        task: Name, class or instance of a model output function.
        train_set_size: Number of training rows.
        save_dir: Folder of the results.
        load_from_save_dir: Continue with existing results.
        device: Device of the computation; the CPU if there is no CUDA device.
        gradient_computer: Class that computes per-sample gradients.
        projector: Projector; a sketch by default.
        saver: Class that stores results; `MmapSaver` by default.
        score_computer: Class that computes features and scores; gradkeep's own by default.
        proj_dim: Dimension of the projection.
        logging_level: Level of the loggers.
        use_half_precision: Store gradients in half precision.
        proj_max_batch_size: Accepted for compatibility and ignored.
        projector_seed: Seed of the projection.
        grad_wrt: Names of the parameters to differentiate; all by default.
        lambda_reg: Ridge added to the diagonal; None for the relative ridge.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(4, 3)
        >>> x, y = torch.randn(20, 4), torch.randint(3, (20,))
        >>> traker = TRAKer(model, "image_classification", 20, tempfile.mkdtemp(), device="cpu",
        ...                 proj_dim=64, logging_level=logging.ERROR)
        >>> traker.load_checkpoint(model.state_dict(), model_id=0)
        >>> traker.featurize((x, y), num_samples=20)
        >>> traker.finalize_features()
        >>> traker.start_scoring_checkpoint("first five", model.state_dict(), 0, num_targets=5)
        Traceback (most recent call last):
        ValueError: 'first five' cannot name an experiment...
        >>> traker.start_scoring_checkpoint("first-five", model.state_dict(), 0, num_targets=5)
        >>> traker.score((x[:5], y[:5]), num_samples=5)
        >>> traker.finalize_scores("first-five").shape
        (20, 5)
    """

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput | type[AbstractModelOutput] | str,
        train_set_size: int,
        save_dir: str | Path = "./trak_results",
        load_from_save_dir: bool = True,
        device: str | torch.device = "cuda",
        gradient_computer: type[AbstractGradientComputer] = FunctionalGradientComputer,
        projector: AbstractProjector | None = None,
        saver: type[AbstractSaver] | None = None,
        score_computer: type[AbstractScoreComputer] | None = None,
        proj_dim: int = 2048,
        logging_level: int = logging.INFO,
        use_half_precision: bool = True,
        proj_max_batch_size: int = 32,
        projector_seed: int = 0,
        grad_wrt: Iterable[str] | None = None,
        lambda_reg: float | None = None,
    ) -> None:
        logging.basicConfig()
        self.logger = logging.getLogger("TRAK")
        self.logger.setLevel(logging_level)
        if lambda_reg is None:
            _warn_default_ridge(self.logger)
        self.model = model
        self.task = load_task(task)
        self.train_set_size = int(train_set_size)
        self.device = self._device(device)
        self.dtype = torch.float16 if use_half_precision else torch.float32
        self.lambda_reg = None if lambda_reg is None else float(lambda_reg)
        self.num_params = get_num_params(model)
        self.grad_wrt = select_parameters(model, grad_wrt)
        named = dict(model.named_parameters())
        names = list(named) if self.grad_wrt is None else self.grad_wrt
        self.num_params_for_grad = sum(named[name].numel() for name in names)
        self.proj_seed = int(projector_seed)
        self.save_dir = Path(save_dir).resolve()
        self.init_projector(projector, proj_dim, proj_max_batch_size)
        self.normalize_factor = torch.tensor(math.sqrt(self.num_params_for_grad))
        self.load_from_save_dir = load_from_save_dir
        self.gradient_computer = gradient_computer(
            model=model,
            task=self.task,
            grad_dim=self.num_params_for_grad,
            dtype=self.dtype,
            device=self.device,
            grad_wrt=self.grad_wrt,  # type: ignore[call-arg] # as the released classes take it
        )
        self._tracer = None
        if type(self.gradient_computer) is FunctionalGradientComputer:
            self._tracer = LayerTracer(model, self.task, names)
        self.score_computer: AbstractScoreComputer | None = None
        if score_computer is not None:
            self.score_computer = score_computer(
                dtype=self.dtype,
                device=self.device,
                logging_level=logging_level,  # type: ignore[call-arg]
                lambda_reg=self.lambda_reg or 0.0,
            )
        self.saver = (MmapSaver if saver is None else saver)(
            save_dir=self.save_dir,
            metadata=self._metadata(),
            train_set_size=self.train_set_size,  # type: ignore[call-arg]
            proj_dim=self.proj_dim,
            load_from_save_dir=load_from_save_dir,
            logging_level=logging_level,
            use_half_precision=use_half_precision,
        )
        self._results: MmapSaver | SaverArrays = (
            self.saver
            if isinstance(self.saver, MmapSaver)
            else SaverArrays(self.saver, self.dtype, self.train_set_size)
        )
        self.ckpt_loaded: int | str = "no ckpt loaded"
        self.scores: Any = None
        self._last_ind = self._last_ind_target = 0

    def init_projector(
        self, projector: AbstractProjector | None, proj_dim: int, proj_max_batch_size: int = 32
    ) -> None:
        """Set the projector, or build a sketch of the kind that the folder was created with, if any.

        Args:
            projector: A projector, or None for a sketch.
            proj_dim: Dimension of the projection.
            proj_max_batch_size: Accepted for compatibility and ignored.
        """
        if projector is None:
            size = self.num_params_for_grad
            # Continue with the sketch of the folder, even if an earlier version created it.
            kind = find_stored_sketch(self.save_dir) or sketch_type(
                size, proj_dim, self.train_set_size
            )
            projector = SketchProjector(size, proj_dim, self.proj_seed, kind, self.device)
        self.projector = projector
        self.proj_dim = projector.proj_dim or self.num_params_for_grad

    def load_checkpoint(
        self,
        checkpoint: Mapping[str, Tensor],
        model_id: int,
        _allow_featurizing_already_registered: bool = False,
    ) -> None:
        """Load weights under a model id, new or existing with the same weights.

        Args:
            checkpoint: State dict of the model.
            model_id: Id of the checkpoint.

        Raises:
            ModelIDException: If the id exists with other weights or settings.
        """
        number = validate_model_id(model_id)
        self._load(checkpoint)
        self._results.open_model(
            number,
            weights=fingerprint_weights(self.model),
            overwrite=_allow_featurizing_already_registered,
        )
        self._last_ind = 0
        self.ckpt_loaded = number

    def featurize(
        self,
        batch: Iterable[Tensor],
        inds: Any = None,
        num_samples: int | None = None,
    ) -> None:
        """Store the projected gradients of training rows; existing rows are skipped.

        Args:
            batch: Fields of the samples, with one row per sample.
            inds: Numbers of the training rows in the batch.
            num_samples: Use the next rows in order instead of `inds`.

        Raises:
            AssertionError: If no checkpoint is loaded, or not exactly one of `inds` and `num_samples` is passed.
            ValueError: If the rows do not match the batch.
        """
        if self.ckpt_loaded != self.saver.current_model_id:
            raise AssertionError(
                "Load a checkpoint using traker.load_checkpoint before featurizing"
            )
        fields = list(batch)
        ids = find_batch_rows(
            fields, inds, num_samples, self._last_ind, self.train_set_size, "training"
        )
        pending = ~self._results.done()[ids]
        if pending.any():
            grads, weights = self._gradients(select_samples(fields, pending))
            self._results.put(ids[pending], grads, weights)
        if inds is None:
            self._last_ind += len(ids)

    def finalize_features(
        self,
        model_ids: Iterable[int] | None = None,
        del_grads: bool = False,
        *,
        lambda_reg: float | str | None = "as before",
    ) -> None:
        """Mark model ids as complete, with the ridge of their scores.

        Args:
            model_ids: Model ids; all by default.
            del_grads: Store features instead of gradients.
            lambda_reg: Finalize again with another ridge; None for the relative ridge.

        Raises:
            ModelIDException: If an id is not registered or not fully featurized.
        """
        self.projector.free_memory()
        self._last_ind = 0
        self._results.refresh()
        new_ridge = lambda_reg != "as before"
        ridge = Ridge(self.lambda_reg)
        if new_ridge:
            ridge = Ridge(None if lambda_reg is None else float(lambda_reg))
        known = self.saver.model_ids
        for number in list(known) if model_ids is None else map(validate_model_id, model_ids):
            if number not in known:
                raise ModelIDException(
                    f"Model ID {number} not registered, not ready for finalizing."
                )
            if known[number]["is_finalized"] and not new_ridge:
                self.logger.warning("Model ID %d already finalized, skipping it.", number)
                continue
            if not known[number]["is_featurized"]:
                raise ModelIDException(
                    f"Model ID {number} not fully featurized, not ready for finalizing."
                )
            self._finalize(number, ridge, del_grads=del_grads)

    def start_scoring_checkpoint(
        self, exp_name: str, checkpoint: Mapping[str, Tensor], model_id: int, num_targets: int
    ) -> None:
        """Load the weights of a model id, and open an experiment.

        Args:
            exp_name: Name of the experiment.
            checkpoint: State dict of the model id.
            model_id: Id of the checkpoint.
            num_targets: Number of targets.

        Raises:
            ModelIDException: If the id does not exist or has other weights.
            ValueError: If the name is invalid.
        """
        number = validate_model_id(model_id)
        name = validate_experiment(exp_name)
        self._load(checkpoint)
        self._results.open_experiment(
            name, int(num_targets), number, weights=fingerprint_weights(self.model)
        )
        self.ckpt_loaded = number
        self._last_ind_target = 0

    def score(
        self,
        batch: Iterable[Tensor],
        inds: Any = None,
        num_samples: int | None = None,
    ) -> None:
        """Store the projected gradients of targets; existing targets are skipped.

        Args:
            batch: Fields of the samples, with one row per sample.
            inds: Numbers of the targets in the batch.
            num_samples: Use the next targets in order instead of `inds`.

        Raises:
            AssertionError: If no experiment is open.
            ModelIDException: If the model id is not finalized.
        """
        number = self.saver.current_model_id
        name = getattr(self.saver, "current_experiment_name", None)
        if number is None or name is None:
            raise AssertionError("Call traker.start_scoring_checkpoint before scoring")
        if not self._results.is_finalized(number):
            raise ModelIDException(
                f"Model ID {number} not finalized, cannot score: call finalize_features first"
            )
        fields = list(batch)
        count = int(self.saver.experiments[name]["num_targets"])
        ids = find_batch_rows(fields, inds, num_samples, self._last_ind_target, count, "target")
        pending = ~self._results.targets_done()[ids]
        if pending.any():
            grads, _ = self._gradients(select_samples(fields, pending))
            self._results.put_targets(ids[pending], grads)
        if inds is None:
            self._last_ind_target += len(ids)

    def finalize_scores(
        self,
        exp_name: str,
        model_ids: Iterable[int] | None = None,
        allow_skip: bool = False,
    ) -> Any:
        """Compute the scores of all training rows for all targets, averaged over model ids.

        The mean over ids of X A^-1 G^T, times the mean weight of each training row. If no ids are passed, ids
        that are not finalized are skipped.

        Args:
            exp_name: Name of the experiment.
            model_ids: Model ids; all finalized ones by default.
            allow_skip: Skip ids that are not finalized or whose targets were not scored.

        Returns:
            Scores `[n, m]` as a memory map.

        Raises:
            ValueError: If the experiment does not exist.
            ModelIDException: If an id cannot be used, or none is left.
        """
        self._last_ind_target = 0
        self._results.refresh()
        if exp_name not in self.saver.experiments:
            raise ValueError(
                f"Experiment {exp_name} does not exist. Create it and compute scores first before "
                "finalizing."
            )
        named = None if model_ids is None else [validate_model_id(one) for one in model_ids]
        used = self._usable(exp_name, named, allow_skip=allow_skip)
        if not used:
            raise ModelIDException(
                f"no model id of {self.save_dir} is finalized and scored for {exp_name}: there is "
                "nothing to average"
            )

        def compute(out: Any) -> None:
            for number, targets in used.items():
                self._add_scores(out, number, targets, share=1 / len(used))
            weights = sum(self._results.train_weights(number) for number in used) / len(used)
            for start in range(0, len(out), _ROWS_PER_BLOCK):
                out[start : start + _ROWS_PER_BLOCK] *= weights[
                    start : start + _ROWS_PER_BLOCK, None
                ]

        self.scores = self._results.put_scores(exp_name, compute)
        return self.scores

    def as_scores(self, exp_name: str) -> Scores:
        """Return finalized scores as `Scores` `[m, n]`, targets x training rows.

        The values are memory-mapped and read on demand.

        Args:
            exp_name: Name of the experiment.

        Returns:
            The scores, with `top`, `to_pandas`, ...
        """
        if not isinstance(self.saver, MmapSaver):
            raise TypeError(f"scores of a {type(self.saver).__name__} are not in a store")
        values = self.saver.scores(validate_experiment(exp_name)).T
        ids = tuple(f"id_{number}" for number in sorted(self.saver.model_ids))
        ridge = "relative ridge" if self.lambda_reg is None else f"ridge {self.lambda_reg:g}"
        return as_scores(values, exp_name, ids, ridge)

    def _add_scores(self, out: Any, number: int, targets: Any, *, share: float) -> None:
        final = self._results.finalized(number)
        assert final is not None
        if isinstance(final, Ridge):
            add_scores(out, self._results.train(number), targets, final, share=share)
        elif self.score_computer is None:
            add_features(out, final, targets, share=share)
        else:
            features = final.read(np.arange(final.count))
            part = torch.zeros(final.count, targets.count)
            target_gradients = targets.read(np.arange(targets.count))
            self.score_computer.get_scores(features, target_gradients, accumulator=part)
            out += part.numpy() * share

    def _usable(
        self, exp_name: str, named: list[int] | None, *, allow_skip: bool
    ) -> dict[int, Any]:
        """Return the targets' gradients of every usable model id."""
        used: dict[int, Any] = {}
        for number in list(self.saver.model_ids) if named is None else named:
            if number not in self.saver.model_ids:
                raise ModelIDException(f"Model ID {number} is not registered in {self.save_dir}")
            if self._results.finalized(number) is None:
                if named is not None and not allow_skip:
                    raise ModelIDException(f"Model ID {number} not finalized, cannot score")
                self.logger.warning("Model ID %d not finalized, skipped.", number)
                continue
            try:
                used[number] = self._results.targets(exp_name, number)
            except MissingTargetsError as error:
                if not allow_skip:
                    raise
                self.logger.warning("Model ID %d skipped: %s", number, error.message)
        return used

    def _finalize(self, number: int, ridge: Ridge, *, del_grads: bool) -> None:
        train = self._results.train(number)
        features = None
        if self.score_computer is not None:
            x = train.read(np.arange(train.count))
            xtx = self.score_computer.get_xtx(x)
            computed = self.score_computer.get_x_xtx_inv(x, xtx).float()
            features = iter([(np.arange(train.count), computed)])
        else:
            require_inverse(train, ridge)
            features = iter_features(train, ridge) if del_grads else None
        self._results.finalize(number, ridge, features)
        if ridge.absolute is None and self.score_computer is None:
            self.logger.info(
                "Model ID %d: a ridge of 1 x the mean diagonal is added before the inversion; pass "
                "lambda_reg to change it.",
                number,
            )
        if del_grads:
            self._results.del_grads(number)

    def _gradients(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return projected gradients `[B, k]` / sqrt(p) and weights `[B, 1]`, float32."""
        number = self.saver.current_model_id
        assert number is not None
        result = None
        if self._tracer is not None:
            result = self._tracer.project(batch, self.projector, number)
        if result is None:
            grads = self.gradient_computer.compute_per_sample_grad(batch=batch)
            projected = self.projector.project(grads, model_id=number)
            result = projected, self.gradient_computer.compute_loss_grad(batch)
        grads, weights = (part.detach().float().cpu() for part in result)
        weights = weights.reshape(-1, 1)
        if len(grads) != len(batch[0]) or len(weights) != len(batch[0]):
            raise ValueError(
                f"the task returned {len(grads)} gradients and {len(weights)} weights for a batch of "
                f"{len(batch[0])}"
            )
        # A sum is finite if all of its terms are, at a tenth of the cost of checking each.
        if not math.isfinite(float(grads.sum() + weights.sum())):
            raise ValueError("gradients or weights of this batch are infinite or not a number")
        return grads / self.normalize_factor, weights

    def _load(self, checkpoint: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(checkpoint)
        self.model.eval()
        self.gradient_computer.load_model_params(self.model)
        if self._tracer is not None:
            self._tracer.reset()

    def _metadata(self) -> dict[str, Any]:
        """Return the settings that results depend on; ids created with others are refused."""
        names = "all" if self.grad_wrt is None else ", ".join(self.grad_wrt)
        return {
            "JL dimension": self.proj_dim,
            "JL matrix type": getattr(self.projector.proj_type, "value", self.projector.proj_type),
            "train set size": self.train_set_size,
            "projector": type(self.projector).__name__,
            "seed": getattr(self.projector, "seed", self.proj_seed),
            "task": describe_task(self.task),
            "parameters": self.num_params_for_grad,
            "grad_wrt": names,
        }

    def _device(self, name: str | torch.device) -> torch.device:
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            self.logger.warning("there is no CUDA device: using the CPU")
            return torch.device("cpu")
        return device


_ROWS_PER_BLOCK = 4096
