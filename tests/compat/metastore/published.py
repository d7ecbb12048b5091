"""What MetaStore's users have on disk, in small: keys, names and places are those of its repository."""

import json
import pickle

import numpy as np
import torch
import yaml

from gradkeep.compat.metastore.__main__ import main
from gradkeep.data import model

QUERY_KEY_VALUE = [
    f"net_bert_encoder_layer_11_attention_self_{name}" for name in ("query", "key", "value")
]
WORDS = "the cat dog sat ran on mat fast ##er ##s stock market goal won ##ning space . , ! ' s"
VOCABULARY = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]


def _model(name, file, layers, trainer):
    return {
        "model_name": name,
        "target_epoch": 2,
        trainer: f"/model_trainers/{name.lower()}_trainer.py",
        "checkpoint_path": f"/models/{file}",
        "optimizer": "sgd",
        "loss_func": "cross_entropy",
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": "5e-4",
        "target_layers": layers,
    }


def config():
    """The published configuration: these keys and these values."""
    data = {"data_loader": "custom", "num_analyzed_samples": 200, "batch_size": 100}
    news = {f"{k}_file": f"./data/AGNews/{k}_data.json" for k in ("train", "dev", "test")}
    return {
        "system": {
            "out_dir_base": ".",
            "out_result_dir": "/output/result",
            "out_meta_result_dir": "/output/meta/",
            "artifacts_store_base": "./artifacts/",
            "valid_methods": ["naive", "ted", "half", "recon"],
            "valid_layer_types": ["linear", "conv2d"],
            "method": "ted",
            "operator_type": "p2p",
            "device": "cuda",
            "collect_artifacts": True,
            "quant": {"use_quant": False, "quant_float_precision": "float32"},
            "float_precision": "float32",
            "io": {
                "max_store_batch_size": 100,
                "loader_max_batch_size": 100,
                "gpu_memory_threshold": 0.02,
            },
            "random_seed": 1,
        },
        "target_model": {
            "VGG16": _model(
                "VGG16",
                "vgg16_models/cifar10_state_dict_finetune_{}.pth",
                ["net_conv13", "net_l1"],
                "trainer_path_path",
            ),
            "Bert": _model(
                "Bert",
                "bert_models/agnews_state_dict_finetune_{}_{}.pth",
                QUERY_KEY_VALUE,
                "trainer_file_path",
            ),
            "ResNet50": _model(
                "ResNet50",
                "resnet50_models/imagenet_state_dict_finetune_{}.pth",
                ["net_l1", "net_model_base_layer4_2_conv2"],
                "trainer_path_path",
            ),
        },
        "data": {
            "cifar10": {"data_name": "cifar10", "data_dir": "/data/cifar10/", **data},
            "AGNews": {
                "data_name": "AGNews",
                **news,
                "unlabeled_file": "./data/AGNews/unlabeled_data.json",
                **data,
            },
            "imagenet": {
                "data_name": "imagenet",
                "data_dir": "./data/imagenet64",
                **data,
                "batch_size": 5,
            },
        },
    }


def write_config(folder, change=None):
    content = config()
    if change is not None:
        change(content)
    (folder / "config.yaml").write_text(yaml.safe_dump(content))


def write_cifar(folder, rows=5, where="data/cifar-10-batches-py"):
    """Where torchvision unpacks it; five batches of so many rows."""
    rng = np.random.default_rng(0)
    place = folder / where
    place.mkdir(parents=True)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        pixels = rng.integers(0, 256, (rows, 3072), np.uint8)
        labels = rng.integers(0, 10, rows).tolist()
        with open(place / name, "wb") as file:
            pickle.dump({b"data": pixels, b"labels": labels}, file, protocol=2)


def write_vgg(folder, epoch=2, seed=3):
    network = model("vgg16", width=4, seed=seed)
    place = folder / "models" / "vgg16_models"
    place.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), place / f"cifar10_state_dict_finetune_{epoch}.pth")
    return network.eval()


def write_news(folder):
    """JSON records as pandas writes them, and the vocabulary beside the checkpoint."""
    rng = np.random.default_rng(1)
    words = [word.removeprefix("##") for word in VOCABULARY[6:]]
    place = folder / "data" / "AGNews"
    place.mkdir(parents=True)
    for split, rows in (("train", 14), ("dev", 3), ("test", 6), ("unlabeled", 3)):
        records = [
            {"text": " ".join(rng.choice(words, int(rng.integers(3, 50)))), "label": int(row % 4)}
            for row in range(rows)
        ]
        (place / f"{split}_data.json").write_text(json.dumps(records))
    beside = folder / "models" / "bert_models"
    beside.mkdir(parents=True)
    (beside / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")


def write_bert(folder, epoch=2, dim=24, inner=10):
    """Twelve layers and twelve heads, as every checkpoint of its Bert has, with its unused pooler."""
    torch.manual_seed(5)
    shapes = {
        "bert.embeddings.word_embeddings.weight": (len(VOCABULARY), dim),
        "bert.embeddings.position_embeddings.weight": (512, dim),
        "bert.embeddings.token_type_embeddings.weight": (2, dim),
        "bert.pooler.dense.weight": (dim, dim),
        "bert.pooler.dense.bias": (dim,),
        "classifier.weight": (4, dim),
        "classifier.bias": (4,),
    }
    norms = ["bert.embeddings"]
    for number in range(12):
        layer = f"bert.encoder.layer.{number}"
        norms += [f"{layer}.attention.output", f"{layer}.output"]
        linear = {f"attention.self.{name}": (dim, dim) for name in ("query", "key", "value")}
        linear |= {"attention.output.dense": (dim, dim), "intermediate.dense": (inner, dim)}
        for name, shape in (linear | {"output.dense": (dim, inner)}).items():
            shapes[f"{layer}.{name}.weight"] = shape
            shapes[f"{layer}.{name}.bias"] = shape[:1]
    # So small that texts stay apart through twelve layers: else gradients are nothing but rounding.
    state = {
        name: torch.randn(shape) * (1.0 if "embeddings" in name else 0.1)
        for name, shape in shapes.items()
    }
    for name in norms:
        state[f"{name}.LayerNorm.weight"] = 1 + 0.1 * torch.randn(dim)
        state[f"{name}.LayerNorm.bias"] = 0.1 * torch.randn(dim)
    state["bert.embeddings.position_ids"] = torch.arange(512)[None]
    file = folder / "models" / "bert_models" / f"agnews_state_dict_finetune_{epoch}_768.pth"
    torch.save(state, file)
    return state


def write_imagenet(folder):
    from PIL import Image

    rng = np.random.default_rng(2)
    for split, rows in (("train", 3), ("val", 2)):
        for name in ("n01", "n02"):
            place = folder / "data" / "imagenet64" / split / name
            place.mkdir(parents=True)
            for row in range(rows):
                picture = rng.integers(0, 256, (64, 64, 3), np.uint8)
                Image.fromarray(picture).save(place / f"{row}.png")


def run(target_model, data, method="ted", samples=25, queries=3, *more):
    """MetaStore's command line in the current folder; the exit code."""
    return main(
        [
            *("--config", "./config.yaml", "--method", method, "--target_model", target_model),
            *("--data", data, "--num_analyzed_samples", str(samples)),
            *("--num_query", str(queries), *more),
        ]
    )


def scores(folder, name):
    """What a run with this name of a folder found."""
    with np.load(next(folder.glob(f"log/*/{name}/scores.npz"))) as scores:
        return dict(scores)
