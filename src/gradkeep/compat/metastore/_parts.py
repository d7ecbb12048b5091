"""The models, data sets and layer names of MetaStore's experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep.data import dataset, model
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from torch import nn

    from gradkeep.compat.metastore._config import Experiment

_MODELS = {"vgg16": "vgg16", "bert": "bert", "resnet50": "resnet50"}
_DATA = {"cifar10": "cifar10", "agnews": "agnews", "imagenet": "imagefolder"}
_SIZES: dict[str, dict[str, Any]] = {
    "bert": {"dim": 768, "heads": 12, "layers": 12, "inner": 3072, "segments": 2, "pooler": True}
}


def make_data(experiment: Experiment) -> tuple[Any, Any]:
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


def make_model(experiment: Experiment, train: Any) -> nn.Module:
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
