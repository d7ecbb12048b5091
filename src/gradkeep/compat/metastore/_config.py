"""MetaStore's configuration file and flags: one block of each kind defines an experiment."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from gradkeep import _arguments
from gradkeep._arguments import one_of, short_repr
from gradkeep._config_file import read_config
from gradkeep.errors import CaptureError

METHODS = ("naive", "ted", "half", "recon")
_ENCODINGS = {
    "torch.float16": "float16-scaled",
    "torch.quint8": "int8-scaled",
    "torch.qint8": "int8-scaled",
    "torch.qint32": "plain",
    "float32": "plain",
}
_HIDDEN = 768

_Text = Annotated[str, msgspec.Meta(min_length=1, pattern="^[^\\0]*$")]
_Names = Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1)]
_LayerTypes = Annotated[tuple[Literal["linear", "conv2d"], ...], msgspec.Meta(min_length=1)]
_Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_CountOrZero = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class _Quant(msgspec.Struct, forbid_unknown_fields=True):
    use_quant: bool = False
    quant_float_precision: Literal[
        "torch.float16", "torch.quint8", "torch.qint8", "torch.qint32", "float32"
    ] = "float32"


class _Io(msgspec.Struct, forbid_unknown_fields=True):
    max_store_batch_size: _Count = 100
    store_batch_size: _Count | None = None  # the README calls the key by this name
    loader_max_batch_size: Any = None
    gpu_memory_threshold: _Share = 0.02
    gpu_memory_cache_threshold: _Share | None = None


class _System(msgspec.Struct, forbid_unknown_fields=True):
    """System block; literals with one value, because MetaStore silently ignores others."""

    out_dir_base: _Text = "."
    out_result_dir: Any = None
    out_meta_result_dir: Any = None
    artifacts_store_base: _Text = "./artifacts/"
    valid_methods: _Names = METHODS
    valid_layer_types: _LayerTypes = ("linear", "conv2d")
    method: Any = None
    operator_type: Any = None
    device: Literal["cuda", "cpu"] = "cuda"
    collect_artifacts: bool = True
    quant: _Quant | None = None
    float_precision: Literal["float32"] = "float32"
    io: _Io | None = None
    random_seed: _CountOrZero = 1
    num_query: Any = None


class _TargetModel(msgspec.Struct, forbid_unknown_fields=True):
    """Block of a model; `sizes` and `vocab_file` are gradkeep's, the other keys MetaStore's."""

    target_layers: _Names
    model_name: _Text | None = None
    target_epoch: _CountOrZero = 2
    trainer_path_path: Any = None
    trainer_file_path: Any = None
    checkpoint_path: _Text | msgspec.UnsetType | None = msgspec.UNSET
    optimizer: Any = None
    loss_func: Literal["cross_entropy"] = "cross_entropy"
    lr: Any = None
    momentum: Any = None
    weight_decay: Any = None
    sizes: dict[str, Any] | None = None
    vocab_file: _Text | None = None


class _Data(msgspec.Struct, forbid_unknown_fields=True):
    data_name: _Text | None = None
    data_dir: _Text | None = None
    train_file: _Text | None = None
    dev_file: _Text | None = None
    test_file: _Text | None = None
    unlabeled_file: _Text | None = None
    data_loader: Any = None
    num_analyzed_samples: Any = None
    batch_size: _Count = 100


Block = TypeVar("Block", bound=msgspec.Struct)
_LEAST_MEMORY = 256 << 20
OWN_CHECKPOINTS = {
    "vgg16": "models/vgg16_models/cifar10_state_dict_finetune_{}.pth",
    "bert": "models/bert_models/agnews_state_dict_finetune_{}_{}.pth",
    "resnet50": "models/resnet50_models/imagenet_state_dict_finetune_{}.pth",
}
"""Paths that MetaStore's program itself reads, regardless of `checkpoint_path`."""
_PART = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")


@dataclass(frozen=True, slots=True)
class WorkingFolder:
    """The folder that MetaStore runs in, and the folder of its configuration.

    A leading slash in a configuration does not mean the root: MetaStore joins paths as text.
    """

    current: Path
    config: Path

    @classmethod
    def of(cls, config: Path) -> WorkingFolder:
        """Return the current folder if the configuration is in or below it, else the configuration's folder."""
        home, current_folder = config.resolve().parent, Path.cwd()
        return cls(current_folder if home.is_relative_to(current_folder) else home, home)

    def candidates(self, path: str) -> list[Path]:
        """Return the possible locations of a path to read, most likely first.

        >>> WorkingFolder(Path("run"), Path("run")).candidates("/data/cifar10/")
        [PosixPath('run/data/cifar10'), PosixPath('/data/cifar10')]
        """
        relative = path.lstrip("/")
        absolute = [Path(path)] if path.startswith("/") else []
        places = [self.current / relative, self.config / relative, *absolute]
        return list(dict.fromkeys(places))

    def find(self, path: str) -> Path:
        """Return the first candidate that exists, else the first one."""
        places = self.candidates(path)
        return next((place for place in places if place.exists()), places[0])


@dataclass(frozen=True, slots=True)
class MetaStoreExperiment:
    """One run, as defined by the configuration and the flags."""

    config: Path
    folder: WorkingFolder
    method: str
    model_name: str
    data_name: str
    target_layers: tuple[str, ...]
    valid_layer_types: tuple[str, ...]
    num_analyzed_samples: int
    num_query: int
    test_indices: tuple[int, ...] | None
    """Test samples to query; None for the first `num_query`."""
    batch_size: int
    """Rows per batch, limited by the store batch size."""
    artifacts: Path
    logs: Path
    name: str | None
    """Separates gradients and results from those of other names."""
    collect: bool
    """Collect missing gradients instead of raising."""
    weights_only: bool
    """Use gradients of weights only, as MetaStore does, without biases."""
    encoding: str
    memory_budget: int
    target_epoch: int
    checkpoint: Path | None
    vocabulary: Path
    """File of WordPiece tokens, next to Bert's checkpoint."""
    files: Mapping[str, str]
    """Paths of the data as configured: `data_dir`, or `train_file` and `test_file`."""
    sizes: Mapping[str, Any]
    """Sizes of the model from its block."""
    device: str
    seed: int
    merged: Mapping[str, Any] = field(repr=False)
    """The selected blocks merged with the flags, as MetaStore writes them with its results."""


def read(
    path: str,
    *,
    method: str,
    target_model: str,
    data: str,
    num_analyzed_samples: int,
    num_query: int,
    test_indices: str | None = None,
    name: str | None = None,
    weights_only: bool = True,
) -> MetaStoreExperiment:
    """Read the experiment from a file and flags; raise `CaptureError` if something is missing or wrong."""
    content = read_config(path, error=CaptureError)
    blocks = {name: _mapping(content, name, path) for name in ("system", "target_model", "data")}
    model_values = _named(blocks["target_model"], target_model, "target_model", path)
    data_values = _named(blocks["data"], data, "data", path)
    system = _validated(path, "system", blocks["system"], _System)
    where = f"target_model.{target_model}"
    model = _validated(path, where, model_values, _TargetModel)
    source = _validated(path, f"data.{data}", data_values, _Data)
    allowed = [name for name in METHODS if name in system.valid_methods]
    one_of("--method", method, allowed, error=CaptureError, code="compat.unknown_method", path=path)
    for flag, value in (("num_analyzed_samples", num_analyzed_samples), ("num_query", num_query)):
        _arguments.count(f"--{flag}", value, error=CaptureError, least=1)
    chosen = None if test_indices is None else parse_indices(test_indices)
    quant, io = system.quant or _Quant(), system.io or _Io()
    folder = WorkingFolder.of(Path(path))
    sizes = model.sizes or {}
    if sizes.get("pooler"):
        raise CaptureError(
            f"{where}.sizes.pooler: MetaStore's Bert has no pooler, it reads [CLS] directly",
            code="compat.pooler",
            path=path,
            fix="Remove pooler; the pooler's weights in a checkpoint are ignored.",
        )
    model_name = model.model_name or target_model
    checkpoint = _checkpoint(where, model, model_name, folder)
    beside = folder.current / "models" if checkpoint is None else checkpoint.parent
    memory_share = io.gpu_memory_cache_threshold or io.gpu_memory_threshold
    files = {
        key: getattr(source, key)
        for key in ("data_dir", "train_file", "dev_file", "test_file", "unlabeled_file")
    }
    return MetaStoreExperiment(
        config=Path(path),
        folder=folder,
        method=method,
        model_name=model_name,
        data_name=source.data_name or data,
        target_layers=model.target_layers,
        valid_layer_types=system.valid_layer_types,
        num_analyzed_samples=num_analyzed_samples,
        num_query=num_query if chosen is None else len(chosen),
        test_indices=chosen,
        batch_size=min(source.batch_size, io.store_batch_size or io.max_store_batch_size),
        artifacts=folder.current / system.artifacts_store_base,
        # Joined as text: its default, "/output/result", would be an absolute path.
        logs=folder.current / system.out_dir_base / "log",
        name=_name(name),
        collect=system.collect_artifacts,
        weights_only=weights_only,
        encoding=_ENCODINGS[quant.quant_float_precision] if quant.use_quant else "plain",
        memory_budget=max(_LEAST_MEMORY, int(memory_share * _free_memory())),
        target_epoch=model.target_epoch,
        checkpoint=checkpoint,
        vocabulary=folder.find(model.vocab_file or str(beside / "vocab.txt")),
        files={key: value for key, value in files.items() if value is not None},
        sizes=sizes,
        device=system.device,
        seed=system.random_seed,
        merged={
            "system": {**blocks["system"], "method": method, "num_query": num_query},
            "target_model": dict(model_values),
            "data": {**data_values, "num_analyzed_samples": num_analyzed_samples},
        },
    )


def _mapping(content: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    block = content.get(name)
    if not isinstance(block, Mapping):
        raise CaptureError(
            f"no block {name!r}",
            code="compat.no_block",
            path=path,
            expected="system, target_model, data",
        )
    return block


def _named(block: Mapping[str, Any], name: str, what: str, path: str) -> Mapping[str, Any]:
    known = [key for key, values in block.items() if isinstance(values, Mapping)]
    one_of(
        f"--{what}", name, known or [None], error=CaptureError, code="compat.no_entry", path=path
    )
    values: Mapping[str, Any] = block[name]
    return values


def _validated(path: str, where: str, values: Mapping[str, Any], kind: type[Block]) -> Block:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        unknown = re.search(r"unknown field `(.+?)`", str(error))
        near = difflib.get_close_matches(unknown[1], kind.__struct_fields__, 1) if unknown else []
        raise CaptureError(
            f"{where}: {error}".replace("`$", f"`{where}"),
            code="compat.invalid_field",
            path=path,
            fix=f"Did you mean {near[0]}?" if near else "Correct the value, or remove the key.",
        ) from None


def _checkpoint(
    where: str, model: _TargetModel, model_name: str, folder: WorkingFolder
) -> Path | None:
    """Return the file of the epoch: from the key, or else where MetaStore's program looks."""
    own = OWN_CHECKPOINTS.get(model_name.lower())
    template = (
        own if isinstance(model.checkpoint_path, msgspec.UnsetType) else model.checkpoint_path
    )
    if template is None:
        return None
    epoch, width = model.target_epoch, (model.sizes or {}).get("dim", _HIDDEN)
    try:
        named = template.format(epoch, width)
    except (IndexError, KeyError, ValueError, AttributeError):
        raise CaptureError(
            f"{where}.checkpoint_path cannot be {short_repr(template)}",
            code="compat.checkpoint_template",
            expected="a template with {} for the epoch and, after it, {} for the hidden size",
            fix=f"Use a template such as {own!r}.",
        ) from None
    _arguments.file_path(f"{where}.checkpoint_path", named, error=CaptureError)
    place = folder.find(named)
    usual = place if own is None else folder.find(own.format(epoch, width))
    return usual if not place.exists() and usual.exists() else place


def _name(name: str | None) -> str | None:
    short = name is not None and len(name) <= 40
    if name is not None and not (short and name.replace("-", "").replace("_", "").isalnum()):
        raise CaptureError(
            f"--name cannot be {_arguments.short_repr(name)}",
            code="compat.invalid_name",
            expected="at most 40 letters, digits, - or _",
            fix="Use a name such as --name second.",
        )
    return name


def _free_memory() -> int:
    """Return the available memory in bytes, or 8 GiB if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable"))
        return int(free.split()[1]) << 10
    except (OSError, StopIteration):
        return 8 << 30


def parse_indices(text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of numbers; `a-b` means all from a to b.

    >>> parse_indices("3,17,20-23")
    (3, 17, 20, 21, 22, 23)
    """
    indices: dict[int, None] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if not first <= last < first + 10_000_000:
            raise CaptureError(
                f"--test_indices cannot be {short_repr(text)}",
                code="compat.test_indices",
                found=short_repr(part),
                expected="numbers and ranges with commas",
                fix="Use a list such as --test_indices 3,17,20-29.",
            )
        for index in range(first, last + 1):
            if index in indices:
                raise CaptureError(
                    f"--test_indices contains {index} twice",
                    code="compat.test_indices_twice",
                    fix="Name every test sample once.",
                )
            indices[index] = None
    return tuple(indices)
