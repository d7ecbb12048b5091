"""MetaStore's configuration file and flags: one block of each kind makes an experiment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradkeep import _arguments
from gradkeep._arguments import shown
from gradkeep.compat.metastore._blocks import ConfigBlock, read_yaml
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
    content = read_yaml(path)
    system = ConfigBlock.checked(path, "system", _block(content, "system", path), "system")
    model = _named(_block(content, "target_model", path), target_model, "target_model", path)
    source = _named(_block(content, "data", path), data, "data", path)
    if method not in system.texts("valid_methods", METHODS) or method not in METHODS:
        raise CaptureError(f"no method {method!r}", path=path, expected=", ".join(METHODS))
    for flag, value in (("num_analyzed_samples", num_analyzed_samples), ("num_query", num_query)):
        if value < 1:
            raise CaptureError(f"--{flag} must be at least 1", found=value, fix=f"--{flag} 1")
    chosen = None if test_indices is None else parse_indices(test_indices)
    _refuse_what_is_not_done(system, model)
    quant, io = system.inner("quant"), system.inner("io")
    folder = WorkingFolder.of(Path(path))
    epoch = model.count("target_epoch", 2, least=0)
    sizes = _sizes(model)
    model_name = model.text("model_name", target_model)
    checkpoint = _checkpoint(model, model_name, folder, epoch, sizes)
    beside = folder.current / "models" if checkpoint is None else checkpoint.parent
    return MetaStoreExperiment(
        config=Path(path),
        folder=folder,
        method=method,
        model_name=model_name,
        data_name=source.text("data_name", data),
        target_layers=model.texts("target_layers"),
        valid_layer_types=system.texts("valid_layer_types", ("linear", "conv2d")),
        num_analyzed_samples=num_analyzed_samples,
        num_query=num_query if chosen is None else len(chosen),
        test_indices=chosen,
        batch_size=min(source.count("batch_size", 100), _store_batch(io)),
        artifacts=folder.current / system.text("artifacts_store_base", "./artifacts/"),
        # Joined as text: its own default, "/output/result", was taken for the root of the disk.
        logs=folder.current / system.text("out_dir_base", ".") / "log",
        name=_name(name),
        collect=system.flag("collect_artifacts", default=True),
        weights_only=weights_only,
        encoding=_encoding(quant),
        memory_budget=max(_LEAST_MEMORY, int(_memory_share(io) * _free_memory())),
        target_epoch=epoch,
        checkpoint=checkpoint,
        vocabulary=folder.find(model.text("vocab_file", str(beside / "vocab.txt"))),
        files={
            key: source.text(key, "")
            for key in ("data_dir", "train_file", "dev_file", "test_file", "unlabeled_file")
            if source.values.get(key) is not None
        },
        sizes=sizes,
        device=system.word("device", "cuda", ("cuda", "cpu"), fix="write device: cuda or cpu"),
        seed=system.count("random_seed", 1, least=0),
        merged={
            "system": {**system.values, "method": method, "num_query": num_query},
            "target_model": dict(model.values),
            "data": {**source.values, "num_analyzed_samples": num_analyzed_samples},
        },
    )


def _block(content: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    found = content.get(name)
    if not isinstance(found, Mapping):
        raise CaptureError(f"no block {name!r}", path=path, expected="system, target_model, data")
    return found


def _named(block: Mapping[str, Any], name: str, what: str, path: str) -> ConfigBlock:
    found = block.get(name)
    if not isinstance(found, Mapping):
        raise CaptureError(
            f"no {what} {name!r}",
            path=path,
            expected=", ".join(map(str, block)),
            fix=f"pass --{what} with one of them, or add the block",
        )
    return ConfigBlock.checked(path, f"{what}.{name}", found, what)


def _refuse_what_is_not_done(system: ConfigBlock, model: ConfigBlock) -> None:
    """Values that nothing here acts upon: MetaStore passes over them in silence."""
    system.word("float_precision", "float32", ("float32",), fix="for fewer bytes see system.quant")
    model.word("loss_func", "cross_entropy", ("cross_entropy",), fix="use gk.capture with a task")
    for kind in system.texts("valid_layer_types", ("linear", "conv2d")):
        if kind not in ("linear", "conv2d"):
            raise system.refused(
                "valid_layer_types", expected="linear, conv2d", fix="use gk.capture for others"
            )


def _sizes(model: ConfigBlock) -> Mapping[str, Any]:
    sizes = model.values.get("sizes") or {}
    if not isinstance(sizes, Mapping) or not all(isinstance(key, str) for key in sizes):
        raise model.refused("sizes", expected="a mapping of sizes", fix="for example {width: 8}")
    if sizes.get("pooler"):
        raise CaptureError(
            f"{model.where}.sizes.pooler: MetaStore's Bert has none, it reads [CLS] itself",
            path=model.path,
            fix="take pooler out; the pooler's weights in a checkpoint are passed over",
        )
    return sizes


def _checkpoint(
    model: ConfigBlock,
    model_name: str,
    folder: WorkingFolder,
    epoch: int,
    sizes: Mapping[str, Any],
) -> Path | None:
    """The file of the epoch: where the key says, or else where MetaStore's program looks."""
    own = OWN_CHECKPOINTS.get(model_name.lower())
    template = model.values.get("checkpoint_path", own)
    if template is None:
        return None
    try:
        named = str(template).format(epoch, sizes.get("dim", _HIDDEN))
    except (IndexError, KeyError, ValueError, AttributeError):
        raise model.refused(
            "checkpoint_path",
            expected="a template with {} for the epoch and, after it, {} for the hidden size",
            fix=f"for example {own!r}",
        ) from None
    _arguments.file_path(f"{model.where}.checkpoint_path", named, error=CaptureError)
    place = folder.find(named)
    usual = place if own is None else folder.find(own.format(epoch, sizes.get("dim", _HIDDEN)))
    return usual if not place.exists() and usual.exists() else place


def _store_batch(io: ConfigBlock) -> int:
    """How many rows may wait to be stored; the README calls the key by its second name."""
    if "store_batch_size" in io.values:
        return io.count("store_batch_size", 100)
    return io.count("max_store_batch_size", 100)


def _memory_share(io: ConfigBlock) -> float:
    key = "gpu_memory_cache_threshold"
    return io.share(key if key in io.values else "gpu_memory_threshold", 0.02)


def _encoding(quant: ConfigBlock) -> str:
    if not quant.flag("use_quant", default=False):
        return "plain"
    precision = quant.word(
        "quant_float_precision",
        "float32",
        tuple(_ENCODINGS),
        fix="write one of them, or use_quant: false",
    )
    return _ENCODINGS[precision]


def _name(name: str | None) -> str | None:
    short = name is not None and len(name) <= 40
    if name is not None and not (short and name.replace("-", "").replace("_", "").isalnum()):
        raise CaptureError(
            f"--name cannot be {_arguments.shown(name)}",
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
                f"--test_indices cannot be {shown(given)}",
                found=shown(part),
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
