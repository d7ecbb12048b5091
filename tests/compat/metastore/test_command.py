"""MetaStore's command line: its configuration, its names, its four methods, without its defects."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import yaml

import gradkeep as gk
from gradkeep.compat.metastore.__main__ import main
from gradkeep.data import model
from gradkeep.data._examples import Scaling


@pytest.fixture
def config(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "images.npz",
        x_train=rng.integers(0, 256, (25, 32, 32, 3), np.uint8),
        y_train=rng.integers(0, 10, 25),
        x_test=rng.integers(0, 256, (6, 32, 32, 3), np.uint8),
        y_test=rng.integers(0, 10, 6),
    )
    network = model("vgg16", width=4, seed=3)
    torch.save(network.state_dict(), tmp_path / "epoch_2.pt")
    content = {
        "system": {"quant": {"use_quant": False}, "io": {"gpu_memory_threshold": 0.02}},
        "target_model": {
            "VGG16": {
                "model_name": "VGG16",
                "target_epoch": 2,
                "checkpoint_path": "epoch_{}.pt",
                "sizes": {"width": 4},
                "target_layers": ["net_conv13", "net_l1"],
            }
        },
        "data": {"cifar10": {"data_name": "cifar10", "data_dir": "images.npz", "batch_size": 10}},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(config, method, *more):
    flags = ["--target_model", "VGG16", "--data", "cifar10"]
    counts = ["--num_analyzed_samples", "25", "--num_query", "3"]
    return main(["--config", str(config), "--method", method, *flags, *counts, *more])


@pytest.mark.parametrize("biases", [False, True])
def test_the_four_methods_agree_with_autograd_and_score_every_sample(config, biases):
    results = {}
    for method in ("naive", "ted", "half", "recon"):
        assert run(config, method, *(["--no-weights_only"] if biases else [])) == 0
        folder = next(config.parent.glob(f"log/*/{method}_cifar10_25_3"))
        results[method] = np.load(folder / "scores.npz")
        times = json.loads((folder / f"times_{method}.json").read_text())
        assert set(times["layers"]) == {"conv13", "l1"}
        assert set(times["layers"]["conv13"]) == {"load", "compute"}
    network = model("vgg16", width=4, seed=3).eval()
    scaling = Scaling((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    data = {
        split: dataclasses.replace(
            gk.data.dataset("cifar10", config.parent / "images.npz", split=split), scaling=scaling
        )
        for split in ("train", "test")
    }
    dense = {}
    for split, count in (("train", 25), ("test", 3)):
        rows = []
        for index in range(count):
            x, y = data[split][index]
            loss = torch.nn.functional.cross_entropy(network(x[None]), torch.as_tensor([y]))
            weights = [network.conv13.weight, network.l1.weight]
            if biases:
                weights += [network.conv13.bias, network.l1.bias]
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]))
        dense[split] = torch.stack(rows).double()
    truth = (dense["test"] @ dense["train"].T).numpy()
    for method, result in results.items():
        # 25 samples in batches of 10: the remainder is scored too, and nothing is divided by 10.
        error = np.linalg.norm(result["scores"] - truth) / np.linalg.norm(truth)
        assert error < 1e-5, method
        assert result["total"] == pytest.approx(result["scores"].sum(0), rel=1e-5)


def test_factors_are_kept_once_for_all_methods_that_use_them(config, capsys):
    assert run(config, "ted") == 0
    capsys.readouterr()
    assert run(config, "half") == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(("precision", "most"), [("torch.float16", 2e-4), ("torch.qint8", 6e-3)])
def test_quantisation_keeps_the_scores_as_the_docs_say(config, precision, most):
    assert run(config, "ted") == 0
    exact = np.load(next(config.parent.glob("log/*/ted_*/scores.npz")))["scores"]
    content = yaml.safe_load(config.read_text())
    content["system"]["quant"] = {"use_quant": True, "quant_float_precision": precision}
    config.write_text(yaml.safe_dump(content))
    assert run(config, "ted") == 0
    narrow = np.load(next(config.parent.glob("log/*/ted_*/scores.npz")))["scores"]
    assert 0 < np.linalg.norm(narrow - exact) / np.linalg.norm(exact) < most


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method", "magic"], "'naive', 'ted', 'half' or 'recon'"),
        (["--target_model", "GPT"], "--target_model must be"),
        (["--data", "mnist"], "--data must be"),
        (["--num_query", "0"], "at least 1"),
        (["--config", "nowhere.yaml"], "the configuration cannot be read"),
    ],
)
def test_mistakes_are_told(config, capsys, flags, words):
    assert run(config, "ted", *flags) == 1
    assert words in capsys.readouterr().err


def test_a_name_that_means_no_layer_is_told(config, capsys):
    content = yaml.safe_load(config.read_text())
    content["target_model"]["VGG16"]["target_layers"] = ["net_conv99"]
    config.write_text(yaml.safe_dump(content))
    assert run(config, "ted") == 1
    assert "net_conv99" in capsys.readouterr().err


def test_a_missing_checkpoint_is_said_aloud(config):
    (config.parent / "epoch_2.pt").unlink()
    with pytest.warns(gk.CaptureWarning, match="random weights"):
        assert run(config, "ted") == 0
