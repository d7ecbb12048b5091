"""What torch shows of a step: storages that live and die, views of them, operators and what they change."""

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
    """Calls back when the storage is gone, and still knows which one it was."""

    __slots__ = ("key",)
    key: int


class Geometry(NamedTuple):
    """All that a tensor is beside its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements."""
    conjugate: bool = False
    """It shows the conjugates of what is stored, as `.conj()` does without computing anything."""
    negative: bool = False
    """It shows the stored numbers with the other sign, as the `.imag` of a conjugate does."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of a tensor."""
        return cls(
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this geometry that shows a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        # Bits that are set in place change nothing that is stored.
        tensor = empty.set_(storage, self.offset, self.size, self.stride)
        torch._C._set_conj(tensor, self.conjugate)
        torch._C._set_neg(tensor, self.negative)
        return tensor

    def on_storage_of(self, base: torch.Tensor) -> torch.Tensor:
        """The same, given any tensor on the storage."""
        if (
            base.dtype is self.dtype
            and base.is_conj() is self.conjugate
            and base.is_neg() is self.negative
        ):
            return base.as_strided(self.size, self.stride, self.offset)
        return self.on(base.untyped_storage())

    def moved(self, base: torch.Tensor, anchor: int) -> Geometry:
        """This geometry on the storage of `base`, where `anchor` bytes stands for where `base` begins."""
        start = int(base.storage_offset()) * base.itemsize - anchor
        return self._replace(offset=self.offset + start // self.dtype.itemsize)

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of the storage that it reaches from and to."""
        steps = zip(self.size, self.stride, strict=True)
        extent = 0 if 0 in self.size else 1 + sum((n - 1) * step for n, step in steps)
        start = self.offset * self.dtype.itemsize
        return start, start + extent * self.dtype.itemsize


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor is one piece of memory, seen through strides; sparse ones are not, shapes without
    content (autograd makes such itself), and zeros that it never writes down."""
    return (
        tensor.layout is torch.strided
        and _is_one_piece(type(tensor))
        and not tensor.is_meta
        and not tensor._is_zerotensor()
        and not tensor.is_nested
    )


@functools.cache
def _is_one_piece(kind: type[Tensor]) -> bool:
    # Classes that wrap several tensors have a storage that nothing is stored in.
    return not hasattr(kind, "__tensor_flatten__")


def find_storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """List the storages that hold a tensor's content, for sparse, nested and wrapping tensors too."""
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
"""Nodes whose gradients torch computes by other formulas, with other rounding, while a mode watches."""

SEQUENCES = frozenset((list, tuple))
"""In what operators take and give several tensors; looking up a type is the fastest test."""


@dataclass(frozen=True, slots=True)
class OperatorSignature:
    """What the log needs to know of an operator."""

    name: str
    writes: tuple[tuple[int, str], ...]
    """Position and name of the arguments that it changes in place."""
    training: int = -1
    """Position of the argument that says whether it does; -1 if it always does."""


_HIDDEN_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
}
"""What operators change while they train, though their schemas do not say so."""


def read_signature(func: Any) -> OperatorSignature:
    """Read the schema once: this is kept per operator."""
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
    """The tensors that the operator changes, in the order of its arguments."""
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
    """The storages that the operator changed, in the order of its arguments."""
    storages = [
        tensor.untyped_storage() for tensor in find_written_tensors(signature, args, kwargs)
    ]
    return {id(storage): storage for storage in storages}


def collect_tensors(values: Iterable[Any], tensors: list[Tensor]) -> None:
    """Add the tensors among the values, and in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) in SEQUENCES:
            tensors += [item for item in value if isinstance(item, Tensor)]


def find_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in an operator's arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in find_tensors(item)]
    return []


def map_nested(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """The same arguments with everything of a type replaced."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(map_nested(item, change, kind) for item in value)
    return value


def view_key(tensor: Tensor) -> tuple[Any, ...]:
    """Which part of its storage a tensor shows, and how."""
    return (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)


_LAZY_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.Negative
)


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator inside of a dispatch mode as it runs outside.

    There torch has switched off that lazy conjugates are looked at. What conjugates within an
    operator (`linalg.pinv` does) would come out wrong, for complex numbers alone.
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
    """A dispatch mode that times every operator and passes it to `ran`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._signatures: dict[Any, OperatorSignature] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps every call and loads its compiler at the first: seconds, for nothing.
        return False

    watching: bool = True
    """Whether operators are passed on."""

    def on_operator(self, call: OperatorCall) -> None:
        """Note an operator."""

    def signature(self, func: Any) -> OperatorSignature:
        """Read the schema of an operator, once."""
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

    # Torch wraps what a class itself defines, hence a method of its own.
    skipped = {"_should_skip_dynamo": classmethod(lambda _: True), "__torch_dispatch__": dispatch}
    return type(mode.__name__, (mode,), skipped)


def exclude_from_compiler(function: F) -> F:
    """The function for this process: if it compiles functions, torch must leave this one alone."""
    if "torch._dynamo" not in sys.modules:
        return function
    left_alone: F = torch._dynamo.disable(function)  # type: ignore[no-untyped-call]
    return left_alone


def is_inside_compiled() -> bool:
    """Whether a function that torch compiled is running: there no mode may come or go."""
    if "torch._dynamo" not in sys.modules:
        return False
    frame, entered = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        entered += frame.f_code.co_filename.endswith("_dynamo/eval_frame.py")
    return entered > 1  # the first is the way into `not_compiled`


def exclude_mode_from_compiler(mode: type[M]) -> type[M]:
    """The mode for this process: if it has compiled functions, torch must not compile the mode too."""
    if "torch._dynamo" not in sys.modules:
        return mode
    skipped: type[M] = _skipped_by_compiler(mode)  # type: ignore[arg-type]
    return skipped
