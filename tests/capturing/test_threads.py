"""Captures in several threads at once: each as if it were alone, and torch as it was in the end."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import checkpoint as checkpointing

import gradkeep as gk
from gradkeep.capturing._readiness import ready


class Checkpointed(nn.Module):
    """A part of it is hidden from autograd until it is asked for."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 9), nn.Linear(9, 3)

    def forward(self, x):
        result = checkpointing.checkpoint(self.inner, x, use_reentrant=True)
        return self.outer(torch.tanh(result))


MODELS = {
    "images": lambda: nn.Sequential(
        *(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4)),
        *(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3)),
    ),
    "linear": lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)),
    "checkpointed": Checkpointed,
}


def make(kind):
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    data = [(torch.randn(3, 6, requires_grad=False), torch.randint(3, (3,))) for _ in range(12)]
    model(data[0][0])
    return model, data


def captured(folder, model, data):
    store = gk.open(folder)
    gk.capture(store, model, data, task=gk.Classification(), split="train", progress=False)
    (key,) = store.captures()
    block = store.read(key)
    result = {name: [] for name in block.names}
    for batch in block.stream(list(block.names)):
        for name, parts in result.items():
            parts.append(np.asarray(batch[name]))
    return {name: np.concatenate(parts) for name, parts in result.items()}


def check_same(one, other):
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert np.array_equal(values, other[name]), name


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("kinds", [["images"] * 6, ["linear"] * 6, list(MODELS) * 3], ids=str)
def test_threads_capture_what_one_would(tmp_path, kinds):
    worlds = {kind: make(kind) for kind in kinds}  # one model of each kind, shared
    alone = {kind: captured(tmp_path / f"alone-{kind}", *worlds[kind]) for kind in worlds}
    with ThreadPoolExecutor(4) as threads:
        result = threads.map(
            lambda at: captured(tmp_path / str(at), *worlds[kinds[at]]), range(len(kinds))
        )
        for kind, one in zip(kinds, result, strict=True):
            check_same(alone[kind], one)


def test_the_last_thread_puts_torch_back():
    before = checkpointing.CheckpointFunction
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with ready(second):
            entered.set()
            leave.wait(60)

    with ready(first):
        other = threading.Thread(target=hold)
        other.start()
        assert entered.wait(60)
    assert checkpointing.CheckpointFunction is not before  # the other one still needs it
    leave.set()
    other.join()
    assert checkpointing.CheckpointFunction is before


def test_one_model_is_watched_by_one_thread_at_a_time():
    model, order = nn.Linear(2, 2), []
    entered = threading.Event()

    def second():
        entered.wait(60)
        with ready(model):
            order.append("second")

    other = threading.Thread(target=second)
    other.start()
    with ready(model), ready(model):  # one thread may do so again
        entered.set()
        other.join(0.2)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
