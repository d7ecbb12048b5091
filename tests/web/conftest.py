"""A small real store with everything that the page shows, and clients that ask about it."""

import shutil

import numpy as np
import pytest
import torch
from web_pages import TEST, TOKEN, TRAIN, digits, network, previews, recipe

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.evaluate._truth import GroundTruth
from gradkeep.remat import record


@pytest.fixture(scope="session")
def master(tmp_path_factory):
    """Two checkpoints of a network on digits, saved scores, an evaluation, a recorded step."""
    folder = tmp_path_factory.mktemp("web") / "digits"
    store = gk.open(folder, durability="process")
    torch.manual_seed(0)
    model = network()
    train, test = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    states = {}
    for epoch in range(1, 13):
        for batch in torch.randperm(TRAIN).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(train[0][batch]), train[1][batch]).backward()
            optimizer.step()
        if epoch in (4, 12):
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            states[f"epoch-{epoch:02d}"] = gk.Weights(weights, step=epoch, lr=0.1)
    as_three = (test[0], torch.full_like(test[1], 3))
    task, quiet = gk.Classification(), {"progress": False}
    for split, batch in (("train", train), ("test", test), ("test-as-3", as_three)):
        gk.capture(store, model, [batch], task=task, split=split, checkpoints=states, **quiet)
    gk.capture(
        store, model, [train], task=task, split="train", keep="losses", run="losses", **quiet
    )
    scores = gk.attribute(store, method="kernel", save="kept")
    rng = np.random.default_rng(0)
    truth = GroundTruth("toy", rng.random((24, TRAIN)) < 0.5, rng.random((24, 2, TEST)))
    evaluate.lds(scores, truth).save("lds-kernel", store=store)
    (folder / "remat").mkdir()
    deep = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
    with record(folder / "remat" / "step.log"):
        deep(torch.randn(512, 32)).sum().backward()
    return folder


@pytest.fixture
def folder(master, tmp_path):
    """A copy of the store, to be changed at will."""
    return shutil.copytree(master, tmp_path / "digits")


@pytest.fixture(scope="session")
def make_client():
    """A function that gives a client of the page about a store."""
    from starlette.testclient import TestClient

    from gradkeep.web._app import create_app
    from gradkeep.web._guard import Access

    def make(store, *, access=None, **values):
        app = create_app(store, access=access or Access(TOKEN), **values)
        return TestClient(app, base_url="http://127.0.0.1", headers={"x-gradkeep-token": TOKEN})

    return make


@pytest.fixture(scope="session")
def shared(master, make_client):
    """A client of the store that nobody changes."""
    return make_client(master, data=previews())


@pytest.fixture
def client(folder, make_client):
    """A client of a copy that may be changed."""
    return make_client(folder, data=previews(), recipe=recipe())
