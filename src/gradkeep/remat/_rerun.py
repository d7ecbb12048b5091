"""How to run an operator again with the same bits and without side effects.

Most operators are simply called. Batch normalization is recomputed from the saved mean and
inverse deviation, without touching the running statistics. Random operators need the generator's
state. Operators that are not known to be safe are not run again: their results are kept.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from gradkeep.remat._tensors import Geometry, map_nested, run_operator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


aten = torch.ops.aten

_NORMALIZERS = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm"})
"""Operators that change running statistics although their schemas do not declare it."""
_NEVER_RERUN = frozenset(
    {
        "aten::miopen_batch_norm",
        "aten::_batch_norm_with_update",
        "aten::_native_batch_norm_legit",
        "aten::batch_norm_update_stats",
        "aten::_fused_moving_avg_obs_fq_helper",
        "aten::set_",
        "aten::resize_",
        "aten::resize_as_",
    }
)
"""Operators with undeclared side effects."""
_UNINITIALIZED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"),
        "new_empty_strided",
    )
)
"""Operators that return uninitialized memory: there is nothing to compare."""
_COMPARED_RESULTS = {"aten::mkldnn_rnn_layer": 3}
"""Number of results to compare; the remaining one is a workspace with unused bytes."""


class TensorRef(NamedTuple):
    """A tensor among an operator's arguments."""

    value: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class FirstResultRerun:
    """Alternative computation of the first result only, with the other results appended to `args`."""

    run: Callable[..., Any] | None
    args: tuple[Any, ...]
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class OperatorRerun:
    """How to run an operator again; `run` is None if that is not known."""

    run: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    random: bool = False
    first_result: FirstResultRerun | None = None

    def reads(self) -> frozenset[int]:
        """Return the values needed to run it."""
        refs: list[TensorRef] = []
        map_nested((self.args, self.kwargs), refs.append, TensorRef)
        return frozenset(ref.value for ref in refs)


def build_rerun(
    func: Any,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    results: Sequence[Tensor],
    *,
    in_place: bool,
) -> OperatorRerun:
    """Build the rerun of an operator that ran with these arguments."""
    name = func._schema.name
    unknown = OperatorRerun(None, (), ())
    named = dict(kwargs)
    if name in _NORMALIZERS:
        return _build_batch_norm_rerun(func, args, kwargs)
    if name in _NEVER_RERUN or not results or named.get("generator") is not None:
        return unknown
    if any(not isinstance(tensor, Tensor) or tensor.layout != torch.strided for tensor in results):
        return unknown
    random = torch.Tag.nondeterministic_seeded in func.tags
    if not name.startswith("aten::") and (in_place or random):
        return unknown  # cannot be verified without side effects
    if name == "aten::empty_like":
        # It reads only the shape of its argument, so a dropped argument need not be recomputed.
        like = results[0]
        empty = functools.partial(torch.empty_strided, dtype=like.dtype, device=like.device)
        return OperatorRerun(empty, (tuple(like.shape), tuple(like.stride())), ())
    # Calling the packet of an overload saves one Python call.
    return OperatorRerun(func._op, args, kwargs, random=random)


def _build_batch_norm_rerun(
    func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> OperatorRerun:
    names = [argument.name for argument in func._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **dict(kwargs)}
    if not arguments.get("training", True):
        return OperatorRerun(func._op, args, kwargs)
    first_result = FirstResultRerun(
        apply_statistics, (arguments["input"], arguments.get("weight"), arguments.get("bias"))
    )
    return OperatorRerun(None, (), (), first_result=first_result)


def apply_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, *_: Tensor
) -> Tensor:
    """Normalize by known statistics, with the arithmetic of the training kernel.

    That kernel multiplies by invstd * weight and adds bias - mean * invstd * weight; the one for
    inference computes weight / sqrt(var + eps) first, which with var = 1 and eps = 0 is the same.
    """
    scale = invstd if weight is None else weight * invstd
    out: Tensor = aten.native_batch_norm(
        x, scale, bias, mean, torch.ones_like(invstd), False, 0.0, 0.0
    )[0]
    return out


def count_temporary_bytes(args: tuple[Any, ...]) -> int:
    """Return the bytes `apply_statistics` allocates besides its result: ones, and the scale if there is a weight."""
    weight, shape = args[1], args[4].geometry
    taken: int = math.prod(shape.size) * shape.dtype.itemsize * (1 if weight is None else 2)
    return taken


def verify_rerun(
    recipe: OperatorRerun,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: Sequence[Tensor],
) -> OperatorRerun:
    """Run an operator once more; return the rerun without `run` if the bits differ."""
    if func._schema.name in _UNINITIALIZED:
        return recipe
    unknown = OperatorRerun(None, recipe.args, recipe.kwargs)
    state = torch.get_rng_state()
    try:
        out = run_operator(func, args, kwargs)
    except Exception:
        return unknown
    if not torch.equal(state, torch.get_rng_state()):
        torch.set_rng_state(state)
        return unknown
    rerun_results = [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]
    count = count_compared_results(func, len(results))
    same = len(rerun_results) == len(results) and all(
        map(same_bits, rerun_results[:count], results[:count])
    )
    return recipe if same else unknown


def verify_first_result_rerun(
    first_result: FirstResultRerun,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: Sequence[Tensor],
) -> FirstResultRerun:
    """Verify the alternative computation of the first result, and measure its cost."""
    names = [argument.name for argument in func._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    own = (arguments["input"], arguments.get("weight"), arguments.get("bias"), *results[1:])
    best = float("inf")
    for _ in range(2):
        start = perf_counter_ns()
        out = apply_statistics(*own)
        best = min(best, (perf_counter_ns() - start) / 1e9)
        if not same_bits(out, results[0]):
            return replace(first_result, run=None)
    return replace(first_result, cost=best)


def count_compared_results(func: Any, count: int) -> int:
    """Return how many of an operator's results must be bitwise equal."""
    return _COMPARED_RESULTS.get(func._schema.name, count)


def has_workspace(name: str) -> bool:
    """Return True if the operator returns a workspace that only its own gradient reads."""
    return name in _COMPARED_RESULTS


def is_uninitialized(name: str) -> bool:
    """Return True if the operator returns uninitialized memory."""
    return f"aten::{name.removeprefix('aten::')}" in _UNINITIALIZED


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return True if shape, strides and all bits are equal; NaN equals itself."""
    if (
        first.shape != second.shape
        or first.dtype != second.dtype
        or first.stride() != second.stride()
        or first.is_conj() != second.is_conj()
        or first.is_neg() != second.is_neg()
    ):
        return False
    return torch.equal(_bits(first), _bits(second))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """View the memory as integers, so that 0 differs from -0."""
    if tensor.is_quantized:
        return tensor.int_repr()
    plain = tensor.detach()
    plain = Geometry.of(plain)._replace(conjugate=False, negative=False).on_storage_of(plain)
    if plain.dtype.is_complex:
        plain = torch.view_as_real(plain)
    kind = _BITS[plain.itemsize]
    return plain if plain.dtype == kind or plain.dtype == torch.bool else plain.view(kind)


_HASH_BLOCK = 1 << 20


def hash_bytes(storage: torch.UntypedStorage, start: int, length: int) -> int:
    """Compute a 64-bit hash of a byte range; about 1 us plus 0.1 ns per byte."""
    if length == 0:
        return 0
    if storage.device.type == "cpu":
        memory = (ctypes.c_char * length).from_address(storage.data_ptr() + start)
        return xxhash.xxh3_64_intdigest(memory)
    return hash_on_device(storage, start, length)


def hash_on_device(storage: torch.UntypedStorage, start: int, length: int) -> int:
    """Hash bytes that cannot be read directly, by weighted sums per block.

    h = sum_p (p + 1) c_p, c_p = sum_i b_i ((2 i + 1) k mod 2^31 - 1), in integers modulo 2^64.
    """
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    flat = flat.set_(storage, start, (length,), (1,))
    weights = torch.arange(min(_HASH_BLOCK, length), dtype=torch.int64, device=storage.device)
    weights = (2 * weights + 1) * 0x9E3779B1 % 2147483647
    total = torch.zeros((), dtype=torch.int64, device=storage.device)
    for number, part in enumerate(torch.split(flat, _HASH_BLOCK)):
        total += (number + 1) * (part.to(torch.int64) * weights[: len(part)]).sum()
    return int(total)


_SAMPLE_SIZE = 32
"""Number of sampled elements of a tensor."""


class TensorSample(NamedTuple):
    """A few elements on a coarse lattice in the tensor."""

    lattice: Geometry

    def of(self, base: Tensor) -> Any:
        """Read the sampled elements from any tensor on the storage; about 3 us."""
        return self.lattice.on_storage_of(base).tolist()


class ContentHash(NamedTuple):
    """Hash of every byte that will be read: one contiguous range, or several tensors."""

    start: int
    length: int
    """Bytes; 0 if the content is not contiguous."""
    parts: tuple[Geometry, ...] = ()

    def of(self, base: Tensor) -> Any:
        """Compute a 64-bit hash from any tensor on the storage; about 1 us plus 0.1 ns per byte."""
        if self.length:
            return hash_bytes(base.untyped_storage(), self.start, self.length)
        hashes = []
        for part in self.parts:
            whole = part.on_storage_of(base).resolve_conj().resolve_neg().contiguous()
            start = int(whole.storage_offset()) * whole.itemsize
            hashes.append(hash_bytes(whole.untyped_storage(), start, whole.nbytes))
        return tuple(hashes)


Fingerprint = TensorSample | ContentHash


def build_content_hash(result: Geometry, slots: Sequence[Geometry], *, whole: bool) -> ContentHash:
    """Choose what to hash of a value: the operator's whole result if it is contiguous, else the saved tensors.

    `whole` means that the operator wrote every element.
    """
    if whole and _is_dense(result):
        return ContentHash(result.offset * result.dtype.itemsize, _nbytes(result))
    if len(set(slots)) == 1 and _is_dense(slots[0]):
        return ContentHash(slots[0].offset * slots[0].dtype.itemsize, _nbytes(slots[0]))
    return ContentHash(0, 0, tuple(dict.fromkeys(slots)))


def _nbytes(geometry: Geometry) -> int:
    return math.prod(geometry.size) * geometry.dtype.itemsize


def _is_dense(geometry: Geometry) -> bool:
    """Return True if the elements are contiguous in memory, in any order."""
    expected = 1
    for step, n in sorted(zip(geometry.stride, geometry.size, strict=True)):
        if n == 1:
            continue
        if step != expected:
            return False
        expected *= n
    return True


def build_sample(geometry: Geometry, count: int = _SAMPLE_SIZE) -> TensorSample:
    """Build a lattice of about `count` elements over a tensor."""
    numel = math.prod(geometry.size)
    if numel and _is_dense(geometry):
        # Any stride stays inside a dense tensor; an odd one visits every channel.
        step = max(1, numel // count)
        step += 1 - step % 2 if step > 1 else 0
        size: Sequence[int] = (1 + (numel - 1) // step,)
        return TensorSample(geometry._replace(size=tuple(size), stride=(step,)))
    remaining, size, stride = max(1, count), [], []
    for n, step in zip(geometry.size, geometry.stride, strict=True):
        some = max(1, min(n, remaining)) if n else 0
        remaining = max(1, remaining // max(some, 1))
        size.append(some)
        stride.append(step * max(1, n // max(some, 1)))
    return TensorSample(geometry._replace(size=tuple(size), stride=tuple(stride)))


def same_content(first: object, second: object) -> bool:
    """Return True if two fingerprints are equal; NaN equals itself."""
    return first == second or repr(first) == repr(second)
