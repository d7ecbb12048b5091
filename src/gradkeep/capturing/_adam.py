"""Adam's moments out of an optimizer's saved state, by the names of the model's parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradkeep._arguments import file_path, instance, texts
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

_FILE = "optimizer.pt"
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_ADAPTER = re.compile(r"(?:^|\.)(?:lora_[A-Za-z_]+|ia3_l|modules_to_save)\.")


@dataclass(frozen=True, slots=True, eq=False)
class AdamState:
    """What Adam knew at a checkpoint, by the names of the parameters that it trained."""

    first: dict[str, torch.Tensor]
    """`exp_avg`, in the parameter's shape."""
    second: dict[str, torch.Tensor]
    """`exp_avg_sq`, in the parameter's shape, without the correction for the first steps."""
    step: int
    """Steps that were taken."""
    beta2: float
    eps: float

    def corrected(self, name: str) -> torch.Tensor:
        """`exp_avg_sq` of a parameter over 1 - beta2^step: what Adam divides by, squared."""
        return self.second[name] / (1 - self.beta2**self.step)


def read_adam(
    source: Mapping[str, Any] | str | os.PathLike[str],
    model: nn.Module,
    *,
    names: Sequence[str] | None = None,
) -> AdamState:
    """The moments of Adam by parameter, from `optimizer.state_dict()`, its file or a Trainer's folder.

    An optimizer numbers its parameters: by group, in the model's order. The groups are those of
    `torch.optim.AdamW(model.parameters())`, of transformers' Trainer (with and without weight decay)
    or of `param_names`, if they were saved; for others, `names` lists all parameters in the
    optimizer's order. All shapes must fit. Cost: reading the file, without running code from it.

    >>> model = nn.Linear(3, 2)
    >>> adam = torch.optim.AdamW(model.parameters())
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> adam.step()
    >>> {name: tuple(v.shape) for name, v in read_adam(adam.state_dict(), model).second.items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    instance("model", model, nn.Module, error=CaptureError, expected="a torch.nn.Module")
    state, path = _read(source)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    kept = {number: state["state"][number] for number in numbers if number in state["state"]}
    _check_adam(kept, path)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    given = None if names is None else texts("names", names, error=CaptureError)
    found = _fitting(_orders(model, state["param_groups"], given), numbers, kept, shapes)
    if len(found) != 1:
        sizes = [len(group["params"]) for group in state["param_groups"]]
        raise CaptureError(
            "this optimizer's state does not fit the model"
            if not found
            else "this optimizer's state fits the model in several ways",
            path=path,
            found=f"{len(numbers)} parameters in groups of {sizes}",
            expected=f"the {len(shapes)} parameters of {type(model).__name__}, or those it trains",
            fix="give the model of that training; if its parameters are grouped in a way of your "
            "own, pass names= in the optimizer's order",
        )
    (order,) = found
    by_name = {
        name: kept[number] for name, number in zip(order, numbers, strict=True) if number in kept
    }
    group = state["param_groups"][0]
    return AdamState(
        first={name: values["exp_avg"] for name, values in by_name.items()},
        second={name: values["exp_avg_sq"] for name, values in by_name.items()},
        step=max(int(values["step"]) for values in by_name.values()),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
    )


def _read(source: Any) -> tuple[Mapping[str, Any], Path | None]:
    path: Path | None = None
    state = source
    if not isinstance(source, Mapping):
        path = Path(file_path("source", source, error=CaptureError))
        path = path / _FILE if path.is_dir() else path
        if not path.exists():
            raise CaptureError(
                "there is no saved optimizer",
                path=path,
                expected=f"a Trainer's checkpoint folder with {_FILE}, or a file of "
                "optimizer.state_dict()",
                fix="train without save_only_model=True, or save the optimizer's state yourself",
            )
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise CaptureError(
                "this optimizer's state cannot be read",
                path=path,
                found=str(error).splitlines()[0][:200],
                fix="save it with torch.save(optimizer.state_dict(), path)",
            ) from error
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state.get("state"), Mapping):
        raise CaptureError(
            "this is not the state of an optimizer",
            path=path,
            found=f"a dict with {', '.join(map(str, state))[:80]}"
            if isinstance(state, Mapping)
            else type(state).__name__,
            expected="state and param_groups, as optimizer.state_dict() gives them",
        )
    return state, path


def _check_adam(kept: Mapping[Any, Any], path: Path | None) -> None:
    wanted = {"exp_avg", "exp_avg_sq", "step"}
    if not kept or any(not wanted <= values.keys() for values in kept.values()):
        some: Mapping[str, Any] = next(iter(kept.values()), {})
        raise CaptureError(
            "this optimizer has no second moments",
            path=path,
            found=", ".join(map(str, some)) or "no state: it has not taken a step",
            expected="exp_avg, exp_avg_sq and step of every parameter, as Adam and AdamW have them",
        )


def _orders(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], given: tuple[str, ...] | None
) -> Iterator[list[str]]:
    """Orders in which an optimizer with such groups may have numbered the model's parameters."""
    if given is not None:
        yield list(given)
        return
    if all("param_names" in group for group in groups):
        yield [name for group in groups for name in group["param_names"]]
        return
    everything = [name for name, _ in model.named_parameters()]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    adapter = [name for name in everything if _ADAPTER.search(name)]
    sizes = [len(group["params"]) for group in groups]
    for names in (trained, everything, adapter):
        if len(groups) == 1:
            yield names
        if len(groups) == 2:
            for undecayed in (_without_decay(model), _vectors(model)):
                parts = [[n for n in names if (n in undecayed) == last] for last in (False, True)]
                if [len(part) for part in parts] == sizes:
                    yield [*parts[0], *parts[1]]


def _fitting(
    orders: Iterator[list[str]],
    numbers: Sequence[Any],
    kept: Mapping[Any, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[list[str]]:
    """Those of the orders in which every moment has its parameter's shape, each once."""
    found: list[list[str]] = []
    for order in orders:
        fits = len(order) == len(numbers) and all(
            number not in kept or tuple(kept[number]["exp_avg_sq"].shape) == shapes.get(name)
            for name, number in zip(order, numbers, strict=True)
        )
        if fits and order not in found:
            found.append(order)
    return found


def _without_decay(model: nn.Module) -> set[str]:
    """The parameters that transformers' Trainer does not decay: biases, and those of norms."""
    norms = [path for path, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    return {
        name
        for name, _ in model.named_parameters()
        if _UNDECAYED.search(name.lower()) or name.rpartition(".")[0] in norms
    }


def _vectors(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.dim() < 2}
