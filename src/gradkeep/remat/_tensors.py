"""View of torch during a step: storage lifetimes, views, operators and their side effects."""

from __future__ import annotations

import functools
import sys
import weakref
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


F = TypeVar("F", bound="Callable[..., Any]")
M = TypeVar("M", bound="OperatorWatcher")


class StorageRef(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage that remembers the storage's id."""

    __slots__ = ("key",)
    key: int


class Geometry(NamedTuple):
    """Everything that defines a tensor besides its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Offset in elements."""
    conjugate: bool = False
    """Conjugate bit, as set by a lazy `.conj()`."""
    negative: bool = False
    """Negative bit, as set by `.imag` of a lazy conjugate."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Return the geometry of a tensor."""
        return cls(
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def overlaps(self, other: Geometry) -> bool:
        """Return True if two tensors of one storage share elements; True if that is too costly to find out."""
        ends = [
            geometry.offset
            + sum((n - 1) * step for n, step in zip(geometry.size, geometry.stride, strict=True))
            + 1
            for geometry in (self, other)
        ]
        if 0 in self.size or 0 in other.size:
            return False
        if self.dtype.itemsize != other.dtype.itemsize or max(ends) > 2**24:
            return True
        if ends[0] <= other.offset or ends[1] <= self.offset:
            return False
        covered = torch.zeros(max(ends), dtype=torch.bool)
        covered.as_strided(self.size, self.stride, self.offset).fill_(True)
        return bool(covered.as_strided(other.size, other.stride, other.offset).any())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor of this geometry on a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        # These bits only affect how the storage is read.
        tensor = empty.set_(storage, self.offset, self.size, self.stride)
        torch._C._set_conj(tensor, self.conjugate)
        torch._C._set_neg(tensor, self.negative)
        return tensor

    def on_storage_of(self, base: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this geometry on the storage of another tensor."""
        if (
            base.dtype is self.dtype
            and base.is_conj() is self.conjugate
            and base.is_neg() is self.negative
        ):
            return base.as_strided(self.size, self.stride, self.offset)
        return self.on(base.untyped_storage())

    def moved(self, base: torch.Tensor, anchor: int) -> Geometry:
        """Return this geometry on the storage of `base`, whose recorded start was `anchor` bytes."""
        start = int(base.storage_offset()) * base.itemsize - anchor
        return self._replace(offset=self.offset + start // self.dtype.itemsize)

    @property
    def span(self) -> tuple[int, int]:
        """First and last byte of the storage that it covers."""
        steps = zip(self.size, self.stride, strict=True)
        extent = 0 if 0 in self.size else 1 + sum((n - 1) * step for n, step in steps)
        start = self.offset * self.dtype.itemsize
        return start, start + extent * self.dtype.itemsize


def has_storage(tensor: Tensor) -> bool:
    """Return True if a tensor is strided memory; False for sparse, nested, meta, zero and wrapper tensors."""
    return (
        tensor.layout is torch.strided
        and _is_one_piece(type(tensor))
        and not tensor.is_meta
        and not tensor._is_zerotensor()
        and not tensor.is_nested
    )


@functools.cache
def _is_one_piece(kind: type[Tensor]) -> bool:
    # The storage of a wrapper class is empty.
    return not hasattr(kind, "__tensor_flatten__")


def find_storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """List the storages that hold a tensor's content, including sparse, nested and wrapper tensors."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [storage for name in names for storage in find_storages(getattr(tensor, name))]
    if tensor.is_meta or tensor._is_zerotensor():
        return []
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    parts = [getattr(tensor, name)() for name in _SPARSE_PARTS.get(tensor.layout, ())]
    return [part.untyped_storage() for part in parts]


_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


MODE_SENSITIVE_NODES = frozenset(
    {
        *("CumprodBackward0", "LinalgLstsqBackward0", "LinalgPinvBackward0"),
        *("MaskedFillBackward1", "MaxBackward1", "MinBackward1", "OrmqrBackward0"),
        *("ProdBackward0", "ProdBackward1"),
    }
)
"""Nodes whose gradients torch computes by other formulas, with other rounding, under a dispatch mode."""

SEQUENCES = frozenset((list, tuple))
"""Container types of tensors in arguments and results; a type lookup is the fastest test."""


@dataclass(frozen=True, slots=True)
class OperatorSignature:
    """Name of an operator and the arguments it writes."""

    name: str
    writes: tuple[tuple[int, str], ...]
    """Position and name of the arguments that it changes in place."""
    training: int = -1
    """Position of the argument that enables the writes; -1 if they always happen."""


_HIDDEN_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
}
"""Arguments that operators write in training although their schemas do not declare it."""


def read_signature(func: Any) -> OperatorSignature:
    """Read the signature from an operator's schema."""
    schema = func._schema
    names = [argument.name for argument in schema.arguments]
    name = schema.name.partition("::")[2]
    if schema.name in _HIDDEN_WRITES:
        hidden = tuple((names.index(one), one) for one in _HIDDEN_WRITES[schema.name])
        return OperatorSignature(name, hidden, names.index("training"))
    writes = tuple(
        (at, argument.name)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return OperatorSignature(name, writes)


def find_written_tensors(
    signature: OperatorSignature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors that the operator writes, in the order of its arguments."""
    at = signature.training
    if at >= 0 and not (args[at] if at < len(args) else kwargs.get("training", True)):
        return []
    tensors: list[Tensor] = []
    for position, name in signature.writes:
        collect_tensors((args[position] if position < len(args) else kwargs.get(name),), tensors)
    return [tensor for tensor in tensors if has_storage(tensor)]


def find_written_storages(
    signature: OperatorSignature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, torch.UntypedStorage]:
    """Return the storages that the operator wrote, in the order of its arguments."""
    storages = [
        tensor.untyped_storage() for tensor in find_written_tensors(signature, args, kwargs)
    ]
    return {id(storage): storage for storage in storages}


def collect_tensors(values: Iterable[Any], tensors: list[Tensor]) -> None:
    """Append the tensors among the values, and in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) in SEQUENCES:
            tensors += [item for item in value if isinstance(item, Tensor)]


def find_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in find_tensors(item)]
    return []


def map_nested(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """Return nested arguments with every instance of a type replaced."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(map_nested(item, change, kind) for item in value)
    return value


def view_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key of the part of its storage that a tensor views."""
    return (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)


_LAZY_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.Negative
)


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator inside a dispatch mode as it runs outside.

    Inside a mode torch disables the handling of lazy conjugates, so operators that conjugate internally
    (such as `linalg.pinv`) would be wrong for complex numbers.
    """
    tensors: list[Tensor] = []
    collect_tensors(args, tensors)
    if kwargs:
        collect_tensors(kwargs.values(), tensors)
    for tensor in tensors:
        if tensor.is_complex():
            break
    else:
        return func(*args, **kwargs)
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - _LAZY_KEYS
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        return func(*args, **kwargs)


class OperatorCall(NamedTuple):
    """An operator that ran."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    signature: OperatorSignature
    inputs: list[Tensor]
    """Tensors among the arguments."""
    outputs: list[Tensor]
    """Tensors among the results."""
    nanoseconds: int


class OperatorWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that times every operator and passes it to `on_operator`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._signatures: dict[Any, OperatorSignature] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps every call and loads its compiler, which takes seconds.
        return False

    watching: bool = True
    """Pass operators to `on_operator`."""

    def on_operator(self, call: OperatorCall) -> None:
        """Handle an operator that ran."""

    def signature(self, func: Any) -> OperatorSignature:
        """Return the cached signature of an operator."""
        known = self._signatures.get(func)
        if known is None:
            known = self._signatures[func] = read_signature(func)
        return known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.watching:
            return run_operator(func, args, kwargs)
        start = perf_counter_ns()
        out = run_operator(func, args, kwargs)
        spent = perf_counter_ns() - start
        outputs = [out] if isinstance(out, Tensor) else find_tensors(out)
        if outputs and outputs[0].is_cuda:
            torch.cuda.synchronize(outputs[0].device)
            spent = perf_counter_ns() - start
        inputs: list[Tensor] = []
        collect_tensors(args, inputs)
        if kwargs:
            collect_tensors(kwargs.values(), inputs)
        signature = self._signatures.get(func) or self.signature(func)
        self.on_operator(OperatorCall(func, args, kwargs, signature, inputs, outputs, spent))
        return out


@functools.cache
def _skipped_by_compiler(mode: Any) -> Any:
    def dispatch(
        self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return mode.__torch_dispatch__(self, func, types, args, kwargs)

    # Torch only wraps methods that the class itself defines.
    skipped = {"_should_skip_dynamo": classmethod(lambda _: True), "__torch_dispatch__": dispatch}
    return type(mode.__name__, (mode,), skipped)


def exclude_from_compiler(function: F) -> F:
    """Return the function, excluded from `torch.compile` if this process uses it."""
    if "torch._dynamo" not in sys.modules:
        return function
    excluded: F = torch._dynamo.disable(function)  # type: ignore[no-untyped-call]
    return excluded


def is_inside_compiled() -> bool:
    """Return True inside a compiled function, where modes must not be entered or exited."""
    if "torch._dynamo" not in sys.modules:
        return False
    frame, entered = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        entered += frame.f_code.co_filename.endswith("_dynamo/eval_frame.py")
    return entered > 1  # the first frame belongs to `exclude_from_compiler`


def exclude_mode_from_compiler(mode: type[M]) -> type[M]:
    """Return the mode class, excluded from `torch.compile` if this process uses it."""
    if "torch._dynamo" not in sys.modules:
        return mode
    skipped: type[M] = _skipped_by_compiler(mode)  # type: ignore[arg-type]
    return skipped
