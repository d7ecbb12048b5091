"""Its numbers: the four methods against a plain transcription of MetaStore's formulas."""

import pickle

import formulas
import numpy as np
import published
import pytest
import torch

from gradkeep.compat.metastore import _config
from gradkeep.compat.metastore._data import DataSource
from gradkeep.compat.metastore._models import build_model

METHODS = ("ted", "half", "recon", "naive")


def pictures(network, batch):
    return network(batch[0]), batch[1]


def texts(network, batch):
    return network(batch["input_ids"], batch["attention_mask"]), batch["labels"]


def prepared(folder, target_model, data, samples, queries):
    """The same model and samples, by other ways than the run's."""
    experiment = _config.read(
        str(folder / "config.yaml"),
        method="ted",
        target_model=target_model,
        data=data,
        num_analyzed_samples=samples,
        num_query=queries,
    )
    source = DataSource(
        data, experiment.files, experiment.folder, experiment.vocabulary, "config.yaml"
    )
    train, test = source.load()
    return build_model(experiment, train), train, test


def its_totals(network, layers, call, train, queries):
    """`total_meta_gradient` of each method, as MetaStore computes it from one batch of each."""
    rows = len(train["labels"] if isinstance(train, dict) else train[1])
    num_queries = len(queries["labels"] if isinstance(queries, dict) else queries[1])
    text = isinstance(train, dict)

    def one(batch, at):
        if text:
            return {name: values[at : at + 1] for name, values in batch.items()}
        return tuple(values[at : at + 1] for values in batch)

    totals = dict.fromkeys(METHODS, 0)
    for layer in layers:
        x, g, _ = formulas.factors(network, layer, call, train)
        alone = [
            formulas.factors(network, layer, call, one(queries, at)) for at in range(num_queries)
        ]
        totals["ted"] = totals["ted"] + formulas.ted((x, g), alone)
        whole = formulas.restored((x, g))
        if text:  # kept sample by sample: no batch divides them
            each = [formulas.factors(network, layer, call, one(train, at))[2] for at in range(rows)]
            whole = torch.stack(each)
        for _, _, gradient in alone:
            totals["naive"] = totals["naive"] + formulas.naive(whole, gradient)
        qx, qg, mean = formulas.factors(network, layer, call, queries)
        if not text:  # the mean of gradients that are divided by the batch already
            mean = formulas.restored((qx, qg)).mean(0)
        totals["half"] = totals["half"] + formulas.half((x, g), mean)
        totals["recon"] = totals["recon"] + formulas.recon((x, g), mean)
    return totals


def check(folder, name, totals, *, text, rows, num_queries):
    """Ours are theirs without the divisions by batch sizes, which docs/coming-from-metastore.md lists."""
    scale = {"ted": rows, "naive": 1 if text else rows}
    scale |= dict.fromkeys(("half", "recon"), rows if text else rows * num_queries)
    for method in METHODS:
        own = published.scores(folder, f"{method}_{name}")
        theirs = (totals[method] * scale[method]).numpy()
        place = next(folder.glob(f"log/*/{method}_{name}"))
        with open(place / f"total_meta_gradient_{method}.pickle", "rb") as file:
            total = pickle.load(file).numpy()
        assert np.linalg.norm(total - theirs) <= 1e-5 * np.linalg.norm(theirs), method
        mean = num_queries if method in ("half", "recon") else 1
        np.testing.assert_allclose(own["total"], total * mean, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("layers", [["net_l1"], ["net_conv7", "net_conv13"]])
def test_linear_and_convolutional_layers(vgg_folder, layers):
    published.write_config(
        vgg_folder, lambda c: c["target_model"]["VGG16"].update(target_layers=layers)
    )
    for method in METHODS:
        assert published.run("VGG16", "cifar10", method, 25, 5) == 0
    network, train, test = prepared(vgg_folder, "VGG16", "cifar10", 25, 5)
    paths = [name.removeprefix("net_") for name in layers]
    totals = its_totals(network, paths, pictures, train[:25], test[:5])
    check(vgg_folder, "cifar10_25_5", totals, text=False, rows=25, num_queries=5)


def test_bert_layers(bert_folder):
    for method in METHODS:
        assert published.run("Bert", "AGNews", method, 14, 6) == 0
    network, train, test = prepared(bert_folder, "Bert", "AGNews", 14, 6)
    paths = [f"bert.encoder.layer.11.attention.self.{n}" for n in ("query", "key", "value")]
    totals = its_totals(network, paths, texts, train[:14], test[:6])
    check(bert_folder, "AGNews_14_6", totals, text=True, rows=14, num_queries=6)


def test_biases_are_left_out_unless_asked_for(vgg_folder):
    assert published.run("VGG16", "cifar10") == 0
    weights = published.scores(vgg_folder, "ted_cifar10_25_3")["scores"]
    assert published.run("VGG16", "cifar10", "ted", 25, 3, "--no-weights_only") == 0
    both = published.scores(vgg_folder, "ted_cifar10_25_3")["scores"]
    network, train, test = prepared(vgg_folder, "VGG16", "cifar10", 25, 3)

    def bias_gradients(data, rows):
        results = []
        for row in range(rows):
            x, y = data[row]
            loss = torch.nn.functional.cross_entropy(network(x[None]), y[None])
            own = torch.autograd.grad(loss, [network.conv13.bias, network.l1.bias])
            results.append(torch.cat(own))
        return torch.stack(results)

    added = bias_gradients(test, 3) @ bias_gradients(train, 25).T
    np.testing.assert_allclose(both - weights, added.numpy(), rtol=1e-3, atol=1e-5)
