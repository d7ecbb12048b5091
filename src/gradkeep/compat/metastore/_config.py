"""MetaStore's configuration file and flags: one block of each kind makes an experiment."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from gradkeep import _arguments
from gradkeep._arguments import short_repr
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
    """Literals with one value: MetaStore passes over other values in silence."""

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
    """`sizes` and `vocab_file` are ours, the other keys MetaStore's."""

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
"""Where MetaStore's program itself looks, whatever `checkpoint_path` says."""
_PART = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")


@dataclass(frozen=True, slots=True)
class WorkingFolder:
    """The folder that MetaStore is run in, and the one that its configuration lies in.

    A leading slash in a configuration is no root: MetaStore joins paths as text.
    """

    current: Path
    config: Path

    @classmethod
    def of(cls, config: Path) -> WorkingFolder:
        """The current folder, if the configuration lies in it or below; else the configuration's own."""
        home, here = config.resolve().parent, Path.cwd()
        return cls(here if home.is_relative_to(here) else home, home)

    def candidates(self, given: str) -> list[Path]:
        """Where a path to read may be, the likeliest first.

        >>> WorkingFolder(Path("run"), Path("run")).candidates("/data/cifar10/")
        [PosixPath('run/data/cifar10'), PosixPath('/data/cifar10')]
        """
        relative = given.lstrip("/")
        absolute = [Path(given)] if given.startswith("/") else []
        places = [self.current / relative, self.config / relative, *absolute]
        return list(dict.fromkeys(places))

    def find(self, given: str) -> Path:
        """The first candidate that exists; if none does, the first."""
        places = self.candidates(given)
        return next((place for place in places if place.exists()), places[0])


@dataclass(frozen=True, slots=True)
class MetaStoreExperiment:
    """One run, with everything that the configuration and the flags say about it."""

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
    """The test samples that are asked about; None: the first `num_query`."""
    batch_size: int
    """Rows at once: those of the data block, but never more than may wait to be stored."""
    artifacts: Path
    logs: Path
    name: str | None
    """Keeps gradients and results apart from those of other names."""
    collect: bool
    """Whether what is not kept yet is collected, or refused."""
    weights_only: bool
    """Whether gradients are those of weights alone, as MetaStore's, or of biases too."""
    encoding: str
    memory_budget: int
    target_epoch: int
    checkpoint: Path | None
    vocabulary: Path
    """The file of WordPiece tokens, which stands beside Bert's checkpoint."""
    files: Mapping[str, str]
    """Where the data is, as the file says it: `data_dir`, or `train_file` and `test_file`."""
    sizes: Mapping[str, Any]
    """Sizes of the model, where the block gives any."""
    device: str
    seed: int
    merged: Mapping[str, Any] = field(repr=False)
    """The chosen blocks with the flags in them, as MetaStore writes them beside its results."""


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
    """The experiment that a file and the flags describe; what is missing or wrong is named."""
    content = _read_yaml(path)
    blocks = {name: _mapping(content, name, path) for name in ("system", "target_model", "data")}
    model_values = _named(blocks["target_model"], target_model, "target_model", path)
    data_values = _named(blocks["data"], data, "data", path)
    system = _validated(path, "system", blocks["system"], _System)
    where = f"target_model.{target_model}"
    model = _validated(path, where, model_values, _TargetModel)
    source = _validated(path, f"data.{data}", data_values, _Data)
    if method not in system.valid_methods or method not in METHODS:
        raise CaptureError(f"no method {method!r}", path=path, expected=", ".join(METHODS))
    for flag, value in (("num_analyzed_samples", num_analyzed_samples), ("num_query", num_query)):
        if value < 1:
            raise CaptureError(f"--{flag} must be at least 1", found=value, fix=f"--{flag} 1")
    chosen = None if test_indices is None else parse_indices(test_indices)
    quant, io = system.quant or _Quant(), system.io or _Io()
    folder = WorkingFolder.of(Path(path))
    sizes = model.sizes or {}
    if sizes.get("pooler"):
        raise CaptureError(
            f"{where}.sizes.pooler: MetaStore's Bert has none, it reads [CLS] itself",
            path=path,
            fix="take pooler out; the pooler's weights in a checkpoint are passed over",
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
        # Joined as text: its own default, "/output/result", was taken for the root of the disk.
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


def _read_yaml(path: str) -> Mapping[str, Any]:
    import yaml

    if not Path(path).is_file():
        raise CaptureError("there is no such configuration", path=path, fix="pass --config FILE")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        found = " ".join(str(error).split())[:300]
        raise CaptureError(
            "this is not YAML", path=path, found=found, fix="correct the file"
        ) from None
    if not isinstance(content, Mapping):
        raise CaptureError(
            "a configuration is a mapping", path=path, expected="system, target_model, data"
        )
    return content


def _mapping(content: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    found = content.get(name)
    if not isinstance(found, Mapping):
        raise CaptureError(f"no block {name!r}", path=path, expected="system, target_model, data")
    return found


def _named(block: Mapping[str, Any], name: str, what: str, path: str) -> Mapping[str, Any]:
    found = block.get(name)
    if not isinstance(found, Mapping):
        raise CaptureError(
            f"no {what} {name!r}",
            path=path,
            expected=", ".join(map(str, block)),
            fix=f"pass --{what} with one of them, or add the block",
        )
    return found


def _validated(path: str, where: str, values: Mapping[str, Any], kind: type[Block]) -> Block:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        unknown = re.search(r"unknown field `(.+?)`", str(error))
        near = difflib.get_close_matches(unknown[1], kind.__struct_fields__, 1) if unknown else []
        raise CaptureError(
            f"{where}: {error}".replace("`$", f"`{where}"),
            path=path,
            fix=f"did you mean {near[0]}?" if near else "correct the value, or take the key out",
        ) from None


def _checkpoint(
    where: str, model: _TargetModel, model_name: str, folder: WorkingFolder
) -> Path | None:
    """The file of the epoch: where the key says, or else where MetaStore's program looks."""
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
            expected="a template with {} for the epoch and, after it, {} for the hidden size",
            fix=f"for example {own!r}",
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
            expected="at most 40 letters, digits, - or _",
            fix="--name second",
        )
    return name


def _free_memory() -> int:
    """Bytes of memory that could be used now; a guess where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable"))
        return int(free.split()[1]) << 10
    except (OSError, StopIteration):
        return 8 << 30


def parse_indices(given: str) -> tuple[int, ...]:
    """The numbers in a list with commas; `a-b` means all from a to b.

    >>> parse_indices("3,17,20-23")
    (3, 17, 20, 21, 22, 23)
    """
    found: dict[int, None] = {}
    for part in given.split(","):
        match = _PART.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if not first <= last < first + 10_000_000:
            raise CaptureError(
                f"--test_indices cannot be {short_repr(given)}: {short_repr(part)}",
                expected="numbers and ranges with commas",
                fix="for example --test_indices 3,17,20-29",
            )
        for index in range(first, last + 1):
            if index in found:
                raise CaptureError(
                    f"--test_indices names {index} twice", fix="name every test sample once"
                )
            found[index] = None
    return tuple(found)
