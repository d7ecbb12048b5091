"""MetaStore's configuration file: blocks for the system, each model and each data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.data import dataset, model
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from torch import nn


METHODS = ("naive", "ted", "half", "recon")
_ENCODINGS = {
    "torch.float16": "float16-scaled",
    "torch.quint8": "int8-scaled",
    "torch.qint8": "int8-scaled",
    "torch.qint32": "plain",
    "float32": "plain",
}
_LEAST_MEMORY = 256 << 20


@dataclass(frozen=True, slots=True)
class MetaStoreExperiment:
    """One run, with everything that the configuration and the flags say about it."""

    config: Path
    method: str
    model_name: str
    data_name: str
    target_layers: tuple[str, ...]
    num_analyzed_samples: int
    num_query: int
    batch_size: int
    artifacts: Path
    logs: Path
    encoding: str
    memory_budget: int
    target_epoch: int
    checkpoint: Path | None
    files: Mapping[str, str]
    """Where the data is: `data_dir`, or `train_file` and `test_file`."""
    sizes: Mapping[str, Any]
    """Sizes of the model, where the block gives any."""
    seed: int


def read(path: str, **flags: Any) -> MetaStoreExperiment:
    """The experiment that a file and the flags describe; what is missing is named."""
    import yaml

    file = Path(path)
    if not file.exists():
        raise CaptureError("there is no such configuration", path=path, fix="pass --config FILE")
    content = yaml.safe_load(file.read_text())
    if not isinstance(content, Mapping):
        raise CaptureError("a configuration is a mapping", path=path)
    system = _block(content, "system", path)
    model = _named(
        _block(content, "target_model", path), flags["target_model"], "target_model", path
    )
    data = _named(_block(content, "data", path), flags["data"], "data", path)
    method = flags["method"]
    valid = tuple(system.get("valid_methods", METHODS))
    if method not in valid or method not in METHODS:
        raise CaptureError(f"no method {method!r}", path=path, expected=", ".join(METHODS))
    quant, io = system.get("quant") or {}, system.get("io") or {}
    precision = str(quant.get("quant_float_precision", "float32"))
    if quant.get("use_quant") and precision not in _ENCODINGS:
        raise CaptureError(
            f"no quant_float_precision {precision!r}", path=path, expected=", ".join(_ENCODINGS)
        )
    share = float(io.get("gpu_memory_threshold", io.get("gpu_memory_cache_threshold", 0.02)))
    epoch = int(model.get("target_epoch", 2))
    template = model.get("checkpoint_path")
    base = file.resolve().parent
    out = str(system.get("out_dir_base", "."))
    layers = model.get("target_layers") or ()
    if not layers:
        raise CaptureError(f"target_model.{flags['target_model']}: no target_layers", path=path)
    for name in ("num_analyzed_samples", "num_query"):
        if flags[name] < 1:
            raise CaptureError(f"--{name} must be at least 1", found=flags[name])
    return MetaStoreExperiment(
        config=file,
        method=method,
        model_name=str(model.get("model_name", flags["target_model"])),
        data_name=str(data.get("data_name", flags["data"])),
        target_layers=tuple(str(layer) for layer in layers),
        num_analyzed_samples=flags["num_analyzed_samples"],
        num_query=flags["num_query"],
        batch_size=int(data.get("batch_size", 100)),
        artifacts=base / str(system.get("artifacts_store_base", "./artifacts/")),
        # Joined as text: its own default, "/output/result", was taken for the root of the disk.
        logs=base / out / "log",
        encoding=_ENCODINGS[precision] if quant.get("use_quant") else "plain",
        memory_budget=max(_LEAST_MEMORY, int(share * _free_memory())),
        target_epoch=epoch,
        checkpoint=None if template is None else base / str(template).format(epoch),
        files={
            key: str(base / str(data[key]))
            for key in ("data_dir", "train_file", "dev_file", "test_file")
            if data.get(key)
        },
        sizes=model.get("sizes") or {},
        seed=int(system.get("random_seed", 1)),
    )


def _block(content: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    found = content.get(name)
    if not isinstance(found, Mapping):
        raise CaptureError(f"no block {name!r}", path=path, expected="system, target_model, data")
    return found


def _named(block: Mapping[str, Any], name: str, what: str, path: str) -> Mapping[str, Any]:
    found = block.get(name)
    if not isinstance(found, Mapping):
        raise CaptureError(f"no {what} {name!r}", path=path, expected=", ".join(map(str, block)))
    return found


def _free_memory() -> int:
    """Bytes of memory that could be used now; a guess where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable"))
        return int(free.split()[1]) << 10
    except (OSError, StopIteration):
        return 8 << 30


_MODELS = {"vgg16": "vgg16", "bert": "bert", "resnet50": "resnet50"}
_DATA = {"cifar10": "cifar10", "agnews": "agnews", "imagenet": "imagefolder"}
_SIZES: dict[str, dict[str, Any]] = {
    "bert": {"dim": 768, "heads": 12, "layers": 12, "inner": 3072, "segments": 2, "pooler": True}
}


def make_data(experiment: MetaStoreExperiment) -> tuple[Any, Any]:
    """The training and the test set."""
    kind = _DATA.get(experiment.data_name.lower())
    if kind is None:
        raise CaptureError(f"no data {experiment.data_name!r}", expected=", ".join(_DATA))
    files = experiment.files
    if kind == "agnews":
        if "train_file" not in files:
            raise CaptureError("data.AGNews: no train_file", fix="give train_file and test_file")
        train = dataset(kind, files["train_file"])
        test_file = files.get("test_file", files.get("dev_file", files["train_file"]))
        return train, dataset(kind, test_file, split="test", vocabulary=files["train_file"])
    if "data_dir" not in files:
        raise CaptureError(f"data.{experiment.data_name}: no data_dir", fix="say where the data is")
    options = {"resize": 64, "crop": 64} if kind == "imagefolder" else {}
    held_out = "val" if kind == "imagefolder" else "test"
    folder = files["data_dir"]
    return dataset(kind, folder, split="train", **options), dataset(
        kind, folder, split=held_out, **options
    )


def make_model(experiment: MetaStoreExperiment, train: Any) -> nn.Module:
    """The model, sized for the data, before its weights are loaded."""
    name = _MODELS.get(experiment.model_name.lower())
    if name is None:
        raise CaptureError(f"no model {experiment.model_name!r}", expected="VGG16, Bert, ResNet50")
    sizes = {**_SIZES.get(name, {}), **experiment.sizes, "classes": len(train.classes)}
    if name == "bert":
        ids, _ = train.input_ids, train.attention_mask
        sizes.setdefault("vocabulary", len(train.vocabulary))
        sizes.setdefault("length", ids.shape[1])
    return model(name, seed=experiment.seed, **sizes)


def dotted_names(network: nn.Module, wanted: tuple[str, ...]) -> list[str]:
    """Layer paths for names like `net_conv13`: `net`, then the path with `_` for every dot.

    Such names can mean two layers; that is an error, as is one that means none.
    """
    known: dict[str, list[str]] = {}
    for path, _ in network.named_modules():
        if path:
            known.setdefault("net_" + path.replace(".", "_"), []).append(path)
    found = []
    for name in wanted:
        paths = known.get(name, [path for path in (name,) if path in dict(network.named_modules())])
        if not paths:
            raise CaptureError(
                f"no layer {name!r}",
                expected="'net_' and the path of a layer, such as net_conv13",
                found=", ".join(list(known)[:6]) + " ...",
            )
        if len(paths) > 1:
            raise CaptureError(f"{name!r} means two layers", found=", ".join(paths))
        found.append(paths[0])
    return found
