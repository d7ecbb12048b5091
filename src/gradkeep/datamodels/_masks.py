"""Which training examples each model saw, one bit each, and subsets drawn from two numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import Limits, NonNegativeInt, PositiveInt, checked
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


AnyArray = np.ndarray[Any, np.dtype[Any]]
_ONES = np.array([byte.bit_count() for byte in range(256)], np.uint8)
Subsets = Literal["fixed", "independent"]
"""`fixed`: every subset has the same size; `independent`: every example with the same chance."""
_MASK, _TRAINING = 0, 1
_ANY = "biufcmMOSUV"
"""Whatever numpy holds: what an array is used for says what must be in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Training subsets of m models over n examples, packed to bits.

    Bit j of a row (least significant first) is set if the model was trained on example j. Takes m n / 8 bytes.

    Attributes:
        bits: Packed bits, uint8 `[m, ceil(n / 8)]`.
        num_examples: Number of examples n.

    Example:
        >>> masks = Masks.of([[1, 0, 1], [0, 1, 1]])
        >>> masks.shape, masks.sizes().tolist(), masks[1:].numpy().astype(int).tolist()
        ((2, 3), [2, 2], [[0, 1, 1]])
    """

    bits: AnyArray
    num_examples: int

    def __post_init__(self) -> None:
        wide = -(-self.num_examples // 8)
        if self.bits.dtype != np.uint8 or self.bits.ndim != 2 or self.bits.shape[1] != wide:
            raise DatamodelsError(
                "not packed masks",
                code="datamodels.packed_bits",
                found=f"{self.bits.dtype} {list(self.bits.shape)}",
                expected=f"uint8 [models, {wide}] for {self.num_examples} examples",
                fix="Use Masks.of(array) for masks that are not packed.",
            )
        spare = wide * 8 - self.num_examples
        if spare and bool((self.bits[:, -1] >> (8 - spare)).any()):
            raise DatamodelsError(
                f"bits are set beyond the last of {self.num_examples} examples",
                code="datamodels.bits_beyond_last",
                fix="Pack with numpy.packbits(masks, axis=1, bitorder='little').",
            )

    @classmethod
    @checked(DatamodelsError)
    def of(cls, masks: Any) -> Masks:
        """Pack masks.

        Args:
            masks: Training subsets `[m, n]`: booleans, zeros and ones, or `Masks`.

        Returns:
            Packed masks; packed ones unchanged.
        """
        if isinstance(masks, Masks):
            return masks
        array = as_array(masks)
        if array.ndim != 2 or array.shape[1] == 0:
            raise DatamodelsError(
                "masks need a row per model and a column per training example",
                code="datamodels.mask_shape",
                found=f"shape {list(array.shape)}",
                expected="[models, examples] with at least one example",
            )
        if array.dtype.kind not in "buif":
            raise DatamodelsError(
                "masks must be booleans or zeros and ones",
                code="datamodels.mask_dtype",
                found=f"dtype {array.dtype}",
            )
        bits = np.empty((len(array), -(-array.shape[1] // 8)), np.uint8)
        step = max(1, (64 << 20) // (array.shape[1] * array.itemsize))
        for start in range(0, len(array), step):
            rows = array[start : start + step]
            if array.dtype.kind != "b":
                _check_binary(rows, start)
            bits[start : start + step] = np.packbits(rows != 0, axis=1, bitorder="little")
        return cls(bits, array.shape[1])

    def __len__(self) -> int:
        return len(self.bits)

    @property
    def shape(self) -> tuple[int, int]:
        """Models, examples."""
        return len(self.bits), self.num_examples

    def __getitem__(self, rows: Any) -> Masks:
        """The masks of some models: a slice, ids or a boolean array."""
        bits = self.bits[rows]
        return Masks(bits if bits.ndim == 2 else bits[None], self.num_examples)

    def __add__(self, other: Masks) -> Masks:
        """These models, then the others."""
        if other.num_examples != self.num_examples:
            raise DatamodelsError(
                "masks of different data sets cannot be joined",
                code="datamodels.other_examples",
                found=f"{other.num_examples} examples",
                expected=f"{self.num_examples} examples",
            )
        return Masks(np.concatenate([self.bits, other.bits]), self.num_examples)

    def numpy(self) -> AnyArray:
        """Return booleans `[m, n]`, in eight times the memory."""
        return self.dense(0, len(self)).view(np.bool_)

    @checked(DatamodelsError)
    def dense(self, start: NonNegativeInt, stop: NonNegativeInt) -> AnyArray:
        """Unpack the masks of some models.

        Args:
            start: First model.
            stop: One after the last model.

        Returns:
            Zeros and ones, uint8 `[stop - start, n]`.
        """
        rows = np.ascontiguousarray(self.bits[start:stop])
        return np.unpackbits(rows, axis=1, count=self.num_examples, bitorder="little")

    @checked(DatamodelsError)
    def blocks(self, most: PositiveInt) -> Iterator[tuple[int, AnyArray]]:
        """Iterate over unpacked blocks of models.

        Args:
            most: Models per block.

        Yields:
            The first model of each block, and its masks, uint8.
        """
        for start in range(0, len(self), most):
            yield start, self.dense(start, min(len(self), start + most))

    def sizes(self) -> AnyArray:
        """Return the subset size of each model `[m]`."""
        return np.asarray(_ONES[self.bits].sum(axis=1, dtype=np.int64))

    def num_repeated(self) -> int:
        """Return the number of models with the mask of an earlier one."""
        rows = np.ascontiguousarray(self.bits)
        whole = rows.view(np.dtype((np.void, rows.shape[1]))).ravel()
        return len(self) - len(np.unique(whole))


def as_array(values: Any) -> AnyArray:
    """Convert a tensor or anything else to an array."""
    return _arguments.array("it", values, error=DatamodelsError, kinds=_ANY, expected="an array")


def _check_binary(rows: AnyArray, start: int) -> None:
    wrong = (rows != 0) & (rows != 1)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise DatamodelsError(
            "masks must hold only zeros and ones",
            code="datamodels.mask_values",
            found=f"{rows[row, column]} for model {start + row}, example {column}",
            fix="Pass masks > 0, or the weights' support, if that is what is meant.",
        )


@checked(DatamodelsError)
def draw_masks(
    seed: NonNegativeInt,
    indices: Sequence[int],
    *,
    num_examples: int,
    alpha: float = 0.5,
    subsets: Subsets = "fixed",
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Draw the masks `[K, num_examples]` of these models; each depends on (seed, index) only.

    Example:
        >>> draw_masks(0, [5], num_examples=8).astype(int).tolist()
        [[0, 0, 1, 1, 0, 0, 1, 1]]
    """
    check_alpha(alpha, num_examples=num_examples)
    masks = np.zeros((len(indices), num_examples), np.bool_)
    for mask, index in zip(masks, indices, strict=True):
        # The raw stream of a bit generator is the one thing numpy promises never to change.
        keys = _bits(seed, int(index), _MASK).random_raw(num_examples)
        if subsets == "fixed":
            mask[np.argsort(keys, kind="stable")[: subset_size(alpha, num_examples)]] = True
        else:
            mask[:] = keys < np.uint64(min(round(alpha * 2**64), 2**64 - 1))
    return masks


def training_seed(seed: int, index: int) -> int:
    """Return the training seed of a model, below 2**31."""
    return int(_bits(seed, index, _TRAINING).random_raw()) >> 33


def subset_size(alpha: float, num_examples: int) -> int:
    """Return the number of examples in a subset of fixed size."""
    return max(1, round(alpha * num_examples))


def check_alpha(alpha: float, *, num_examples: int) -> None:
    """Validate the share of examples in a subset."""
    if not 0 < alpha < 1:
        raise DatamodelsError(
            "alpha is the share of examples in a subset",
            code="datamodels.alpha",
            found=alpha,
            expected="0 < alpha < 1",
        )
    if num_examples < 2:
        raise DatamodelsError(
            "subsets need examples to choose from",
            code="datamodels.too_few_examples",
            found=f"{num_examples} examples",
        )


def _bits(seed: int, index: int, purpose: int) -> np.random.Philox:
    return np.random.Philox(np.random.SeedSequence([seed, index, purpose]))


@dataclass(frozen=True, slots=True, eq=False)
class PlantedData:
    """Synthetic subsets and outputs with known weights.

    Attributes:
        masks: Subsets `[m, n]`.
        outputs: Outputs `[m, t]`.
        weights: True weights `[n, t]`.
        bias: True biases `[t]`.
    """

    masks: AnyArray
    outputs: AnyArray
    weights: AnyArray
    bias: AnyArray


@checked(DatamodelsError)
def planted(
    models: PositiveInt,
    examples: PositiveInt,
    targets: PositiveInt,
    *,
    alpha: Annotated[float, Limits(least=0, most=1)] = 0.5,
    large: NonNegativeInt = 5,
    tail: Annotated[float, Limits(least=0)] = 0.02,
    explained: Annotated[float, Limits(above=0, most=1)] = 0.8,
    seed: NonNegativeInt = 0,
) -> PlantedData:
    """Generate outputs = masks . weights + bias + noise.

    Args:
        models: Number of models m.
        examples: Number of training examples n.
        targets: Number of outputs t.
        alpha: Probability of an example to be in a subset.
        large: Large weights per target.
        tail: Standard deviation of all other weights.
        explained: Share of an output's variance that is not noise.
        seed: Random seed.

    Returns:
        Masks, outputs and the true weights.

    Example:
        >>> data = planted(100, 20, 3)
        >>> data.masks.shape, data.outputs.shape, data.weights.shape
        ((100, 20), (100, 3), (20, 3))
    """
    rng = np.random.default_rng(seed)
    masks = rng.random((models, examples)) < alpha
    weights = rng.normal(0, tail, (examples, targets))
    for target in range(targets):
        chosen = rng.choice(examples, min(large, examples), replace=False)
        weights[chosen, target] += rng.laplace(0, 0.5, len(chosen))
    signal = masks.astype(np.float64) @ weights
    noise = rng.standard_normal(signal.shape) * signal.std(axis=0) * np.sqrt(1 / explained - 1)
    bias = rng.normal(0, 3, targets)
    return PlantedData(masks, signal + noise + bias, weights, bias)
