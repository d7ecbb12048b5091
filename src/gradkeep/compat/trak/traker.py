"""`TRAKer`: checkpoints in, projected gradients kept, scores out."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.capturing._weights import fingerprint_weights
from gradkeep.compat.trak._abstract_saver import checked_experiment, checked_model_id
from gradkeep.compat.trak._features import (
    Ridge,
    add_features,
    add_scores,
    chosen_parameters,
    described,
    features_of,
    require_inverse,
    rows_of_batch,
    taken,
    task_named,
)
from gradkeep.compat.trak._imported import as_scores
from gradkeep.compat.trak._saver_arrays import SaverArrays
from gradkeep.compat.trak._store_saver import begun_with
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
def _note_default_ridge(logger: logging.Logger) -> None:
    """Say once per process that scores differ from the released package's by default."""
    logger.warning(
        "lambda_reg is not given: gradkeep adds a ridge of 1 x the mean diagonal, where the released "
        "package adds none, so that the rankings of the two differ. Pass lambda_reg=0.0 for its "
        "scores; 'Coming from TRAK' in the documentation says what the ridge gains."
    )


class TRAKer:
    """Scores training rows for targets by TRAK, with the released package's names.

    What differs from the released package, on purpose:

    - gradients are sketched from layer factors, without a random matrix; `projector` chooses one;
    - `lambda_reg=None`, the default, adds 1 x the mean diagonal to the matrix that is inverted; a
      number is added as it is, with the released scale; 0 with `proj_dim >= train_set_size` raises;
    - gradients are durable when `featurize` and `score` return, and whatever would mix, lose or
      invent results raises.

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
            _note_default_ridge(self.logger)
        self.model = model
        self.task = task_named(task)
        self.train_set_size = int(train_set_size)
        self.device = self._device(device)
        self.dtype = torch.float16 if use_half_precision else torch.float32
        self.lambda_reg = None if lambda_reg is None else float(lambda_reg)
        self.num_params = get_num_params(model)
        self.grad_wrt = chosen_parameters(model, grad_wrt)
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
        """Take the projector that is given, or a sketch: of the kind that the folder has, if any."""
        if projector is None:
            size = self.num_params_for_grad
            # What was begun goes on, also if it was with the sketch of an earlier version.
            kind = begun_with(self.save_dir) or sketch_type(size, proj_dim, self.train_set_size)
            projector = SketchProjector(size, proj_dim, self.proj_seed, kind, self.device)
        self.projector = projector
        self.proj_dim = projector.proj_dim or self.num_params_for_grad

    def load_checkpoint(
        self,
        checkpoint: Mapping[str, Tensor],
        model_id: int,
        _allow_featurizing_already_registered: bool = False,
    ) -> None:
        """Load weights under an id, new or begun before with the same weights."""
        number = checked_model_id(model_id)
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
        """Keep the projected gradients of training rows; those that are there are not computed.

        `inds` says which rows the batch holds; `num_samples` takes the next ones in order.
        """
        if self.ckpt_loaded != self.saver.current_model_id:
            raise AssertionError(
                "Load a checkpoint using traker.load_checkpoint before featurizing"
            )
        fields = list(batch)
        ids = rows_of_batch(
            fields, inds, num_samples, self._last_ind, self.train_set_size, "training"
        )
        left = ~self._results.done()[ids]
        if left.any():
            grads, weights = self._gradients(taken(fields, left))
            self._results.put(ids[left], grads, weights)
        if inds is None:
            self._last_ind += len(ids)

    def finalize_features(
        self,
        model_ids: Iterable[int] | None = None,
        del_grads: bool = False,
        *,
        lambda_reg: float | str | None = "as before",
    ) -> None:
        """Mark model ids as complete, with the ridge that their scores will have.

        Another `lambda_reg` (None: the relative ridge) finalizes an id again. `del_grads` keeps
        features in place of gradients.
        """
        self.projector.free_memory()
        self._last_ind = 0
        self._results.refresh()
        again = lambda_reg != "as before"
        ridge = Ridge(self.lambda_reg)
        if again:
            ridge = Ridge(None if lambda_reg is None else float(lambda_reg))
        known = self.saver.model_ids
        for number in list(known) if model_ids is None else map(checked_model_id, model_ids):
            if number not in known:
                raise ModelIDException(
                    f"Model ID {number} not registered, not ready for finalizing."
                )
            if known[number]["is_finalized"] and not again:
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
        """Load the weights of a model id, and open an experiment to score targets in."""
        number = checked_model_id(model_id)
        name = checked_experiment(exp_name)
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
        """Keep the projected gradients of targets; those that are there are not computed."""
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
        ids = rows_of_batch(fields, inds, num_samples, self._last_ind_target, count, "target")
        left = ~self._results.targets_done()[ids]
        if left.any():
            grads, _ = self._gradients(taken(fields, left))
            self._results.put_targets(ids[left], grads)
        if inds is None:
            self._last_ind_target += len(ids)

    def finalize_scores(
        self,
        exp_name: str,
        model_ids: Iterable[int] | None = None,
        allow_skip: bool = False,
    ) -> Any:
        """Scores `[n, m]` of all rows for all targets, averaged over model ids, as a memory map.

        The mean over ids of X A^-1 G^T, times the mean weight of each training row. Ids that are
        not finalized are left out if none were named, or with `allow_skip`; so are, with it, those
        whose targets were not scored.
        """
        self._last_ind_target = 0
        self._results.refresh()
        if exp_name not in self.saver.experiments:
            raise ValueError(
                f"Experiment {exp_name} does not exist. Create it and compute scores first before "
                "finalizing."
            )
        named = None if model_ids is None else [checked_model_id(one) for one in model_ids]
        used = self._usable(exp_name, named, allow_skip=allow_skip)
        if not used:
            raise ModelIDException(
                f"no model id of {self.save_dir} is finalized and scored for {exp_name}: there is "
                "nothing to average"
            )

        def made(out: Any) -> None:
            for number, targets in used.items():
                self._add_scores(out, number, targets, share=1 / len(used))
            weights = sum(self._results.train_weights(number) for number in used) / len(used)
            for start in range(0, len(out), _BLOCK):
                out[start : start + _BLOCK] *= weights[start : start + _BLOCK, None]

        self.scores = self._results.put_scores(exp_name, made)
        return self.scores

    def as_scores(self, exp_name: str) -> Scores:
        """Finalized scores as `Scores` `[m, n]`, targets x training rows: `top`, `to_pandas`, ...

        Mapped from the file, some targets at a time where they are asked for.
        """
        if not isinstance(self.saver, MmapSaver):
            raise TypeError(f"scores of a {type(self.saver).__name__} are not kept in a store")
        values = self.saver.scores(checked_experiment(exp_name)).T
        ids = tuple(f"id_{number}" for number in sorted(self.saver.model_ids))
        ridge = "relative ridge" if self.lambda_reg is None else f"ridge {self.lambda_reg:g}"
        return as_scores(values, exp_name, ids, ridge)

    def _add_scores(self, out: Any, number: int, targets: Any, *, share: float) -> None:
        found = self._results.finalized(number)
        assert found is not None
        if isinstance(found, Ridge):
            add_scores(out, self._results.train(number), targets, found, share=share)
        elif self.score_computer is None:
            add_features(out, found, targets, share=share)
        else:
            features = found.read(np.arange(found.count))
            part = torch.zeros(found.count, targets.count)
            asked = targets.read(np.arange(targets.count))
            self.score_computer.get_scores(features, asked, accumulator=part)
            out += part.numpy() * share

    def _usable(
        self, exp_name: str, named: list[int] | None, *, allow_skip: bool
    ) -> dict[int, Any]:
        """The targets' gradients of every id that scores can be made of."""
        used: dict[int, Any] = {}
        for number in list(self.saver.model_ids) if named is None else named:
            if number not in self.saver.model_ids:
                raise ModelIDException(f"Model ID {number} is not registered in {self.save_dir}")
            if self._results.finalized(number) is None:
                if named is not None and not allow_skip:
                    raise ModelIDException(f"Model ID {number} not finalized, cannot score")
                self.logger.warning("Model ID %d not finalized, left out of the scores.", number)
                continue
            try:
                used[number] = self._results.targets(exp_name, number)
            except MissingTargetsError as error:
                if not allow_skip:
                    raise
                self.logger.warning("Model ID %d left out of the scores: %s", number, error.message)
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
            features = features_of(train, ridge) if del_grads else None
        self._results.finalize(number, ridge, features)
        if ridge.absolute is None and self.score_computer is None:
            self.logger.info(
                "Model ID %d: a ridge of 1 x the mean diagonal is added before inverting; pass "
                "lambda_reg for another.",
                number,
            )
        if del_grads:
            self._results.del_grads(number)

    def _gradients(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Projected gradients `[B, k]` / sqrt(p) and weights `[B, 1]`, float32."""
        number = self.saver.current_model_id
        assert number is not None
        found = None
        if self._tracer is not None:
            found = self._tracer.project(batch, self.projector, number)
        if found is None:
            grads = self.gradient_computer.compute_per_sample_grad(batch=batch)
            projected = self.projector.project(grads, model_id=number)
            found = projected, self.gradient_computer.compute_loss_grad(batch)
        grads, weights = (part.detach().float().cpu() for part in found)
        weights = weights.reshape(-1, 1)
        if len(grads) != len(batch[0]) or len(weights) != len(batch[0]):
            raise ValueError(
                f"the task gave {len(grads)} gradients and {len(weights)} weights for a batch of "
                f"{len(batch[0])}"
            )
        # A sum is finite if all of its terms are, and costs a tenth of looking at each.
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
        """What results depend on; ids that were begun with anything else are refused."""
        names = "all" if self.grad_wrt is None else ", ".join(self.grad_wrt)
        return {
            "JL dimension": self.proj_dim,
            "JL matrix type": getattr(self.projector.proj_type, "value", self.projector.proj_type),
            "train set size": self.train_set_size,
            "projector": type(self.projector).__name__,
            "seed": getattr(self.projector, "seed", self.proj_seed),
            "task": described(self.task),
            "parameters": self.num_params_for_grad,
            "grad_wrt": names,
        }

    def _device(self, wanted: str | torch.device) -> torch.device:
        device = torch.device(wanted)
        if device.type == "cuda" and not torch.cuda.is_available():
            self.logger.warning("there is no CUDA device: using the CPU")
            return torch.device("cpu")
        return device


_BLOCK = 4096
