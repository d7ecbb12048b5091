"""A small world that is trained, captured and judged once: blobs of two classes, some of them copies."""

import numpy as np
import pytest
import torch

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.datamodels import Training
from gradkeep.evaluate._agreement import randomize

ROWS, QUERIES = 80, 12


def make():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def data():
    rng = torch.Generator().manual_seed(0)
    centres = 1.2 * torch.randn(3, 6, generator=rng)
    labels = torch.arange(ROWS + QUERIES) % 3
    inputs = centres[labels] + torch.randn(ROWS + QUERIES, 6, generator=rng)
    train, queries = (inputs[:ROWS], labels[:ROWS]), (inputs[ROWS:], labels[ROWS:])
    return train, queries


def recipe():
    train, queries = data()
    training = Training(make, epochs=12, batch_size=10, lr=0.1, options={"momentum": 0.9})
    return evaluate.Recipe(train, queries, training)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A store with captures of two checkpoints and a ground truth of 40 subsets x 2 seeds."""
    store = gk.open(tmp_path_factory.mktemp("world"), durability="process")
    how = recipe()
    evaluate.ground_truth(store, how, subsets=40, stacked=True, workers=0)
    model = how.training.train_one(*how.train, seed=99).eval()
    random = randomize(model, seed=4).eval()
    for split, batch in (("train", how.train), ("test", how.queries)):
        for net, run in ((model, "main"), (random, "random")):
            common = {"task": gk.Classification(), "split": split, "run": run, "progress": False}
            gk.capture(store, net, [batch], **common)
    return store


@pytest.fixture(scope="session")
def wrong():
    """Rows that some tests take for wrong."""
    return np.arange(0, ROWS, 9)
