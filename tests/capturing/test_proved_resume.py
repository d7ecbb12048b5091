"""Runs that go on with kept rows prove that these are still the same: all contents, some gradients."""

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradkeep as gk
from gradkeep.errors import CaptureError

KEY = gk.store.CaptureKey("final", "train")
ROWS = 40


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (ROWS,), generator=generator))


def capture(store, model, data, **options):
    options = {"task": gk.Classification(), "split": "train", "progress": False} | options
    loader = data if isinstance(data, list) else DataLoader(data, batch_size=8)
    return gk.capture(store, model, loader, **options)


class PulledCable(Exception):
    pass


def begin(store, model, data, task, *, batches=3, **options):
    """Capture some batches in segments of a few rows, then break."""
    loader = list(DataLoader(data, batch_size=8))

    class Broken:
        def __iter__(self):
            yield from loader[:batches]
            raise PulledCable

    options = {"memory_budget": 8000, "ids": range(ROWS)} | options
    with pytest.raises(PulledCable):
        capture_loader(store, model, Broken(), task=task, **options)
    return len(store.read(KEY, live=True))


def capture_loader(store, model, loader, **options):
    return gk.capture(store, model, loader, split="train", progress=False, **options)


def go_on(store, model, data, task, **options):
    options = {"memory_budget": 8000, "ids": range(ROWS)} | options
    return capture(store, model, list(DataLoader(data, batch_size=8)), task=task, **options)


def changed_labels(data, rows):
    x, y = data.tensors
    y = y.clone()
    y[rows] = (y[rows] + 1) % 3
    return TensorDataset(x, y)


@pytest.mark.parametrize("rows", [[*range(8, 40)], [39], [17, 23]])
def test_a_rerun_compares_all_rows_and_names_those_that_differ(store, model, data, rows):
    capture(store, model, data)
    with raises(CaptureError, "capture.rows_changed", mentions=f"sample {rows[0]} ") as caught:
        capture(store, model, changed_labels(data, rows))
    assert f"{len(rows)} of {ROWS} rows" in caught.value.found
    assert "name=" in caught.value.fix
    assert "delete" in caught.value.fix
    assert capture(store, model, data).reused_rows == ROWS


@pytest.mark.parametrize("place", [0, 19, 39])
def test_a_rerun_notices_one_changed_pixel(store, model, data, place):
    capture(store, model, data)
    x, y = (part.clone() for part in data.tensors)
    x[place, 3] = x[place, 3].nextafter(torch.tensor(9.0))
    with raises(CaptureError, "capture.rows_changed", mentions=f"sample {place} "):
        capture(store, model, TensorDataset(x, y))


def test_a_rerun_notices_changed_texts(store, model):
    class Lengths(gk.Task):
        def losses(self, model, batch):
            x = torch.stack(
                [batch["x"][:, 0], *[torch.tensor([len(t) * 1.0 for t in batch["texts"]])] * 3], 1
            )
            return model(x).square().sum(1)

    batch = {"x": torch.randn(4, 1), "texts": ["a", "bb", "ccc", "dddd"]}
    capture(store, model, [batch], task=Lengths())
    assert capture(store, model, [batch], task=Lengths()).reused_rows == 4
    with raises(CaptureError, "capture.rows_changed", mentions="sample 2 "):
        capture(store, model, [batch | {"texts": ["a", "bb", "cXc", "dddd"]}], task=Lengths())


@pytest.mark.parametrize("count", [8, 39, 41, 48])
def test_a_rerun_with_fewer_or_more_rows_is_refused(store, model, data, count):
    class Rows:  # of unknown length
        def __init__(self, count):
            self.count = count

        def __iter__(self):
            x, y = (torch.cat([part, part + part.dtype.is_floating_point]) for part in data.tensors)
            return iter(zip(x[: self.count].split(8), y[: self.count].split(8), strict=True))

    capture_loader(store, model, Rows(ROWS), task=gk.Classification())
    assert capture_loader(store, model, Rows(ROWS), task=gk.Classification()).reused_rows == ROWS
    with raises(CaptureError, "capture.other_rows"):
        capture_loader(store, model, Rows(count), task=gk.Classification())


def test_rows_that_were_dropped_on_purpose_stay_dropped(store, model, data):
    capture(store, model, data)
    store.drop_rows(KEY, [3, 30])
    assert capture(store, model, data).reused_rows == ROWS - 2
    with raises(CaptureError, "capture.rows_changed", mentions="sample 9 "):
        capture(store, model, changed_labels(data, [9]))


class Scaled(gk.Task):
    """An own task whose attribute and code nobody fingerprints."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def losses(self, model, batch):
        return self.scale * nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Focal(Scaled):
    def losses(self, model, batch):
        losses = super().losses(model, batch)
        return (1 - torch.exp(-losses)).square() * losses

    def describe(self):
        return Scaled().describe()


def test_a_resume_with_another_attribute_of_an_own_task_is_refused(store, model, data):
    stored_rows = begin(store, model, data, Scaled())
    assert 0 < stored_rows < ROWS
    with raises(CaptureError, "capture.function_changed") as caught:
        go_on(store, model, data, Scaled(1.01))
    assert "sample 0 " in caught.value.message
    assert "loss" in caught.value.found
    assert len(store.read(KEY, live=True)) == stored_rows
    assert go_on(store, model, data, Scaled()).reused_rows >= 8


def test_a_resume_with_other_code_of_an_own_task_is_refused(store, model, data):
    begin(store, model, data, Scaled())
    with raises(CaptureError, "capture.function_changed"):
        go_on(store, model, data, Focal())


@pytest.mark.parametrize("sealed", [True, False])
def test_another_activation_with_the_same_weights_is_refused(store, model, data, sealed):
    if sealed:
        capture(store, model, data)
    else:
        begin(store, model, data, gk.Classification())
    model[1] = nn.GELU()
    with raises(CaptureError, "capture.function_changed"):
        (capture if sealed else go_on)(store, model, data, task=gk.Classification())


def test_gradients_are_compared_not_only_losses(store, model, data):
    """The same losses with other gradients: a hidden detach."""

    class Detached(Scaled):
        def losses(self, model, batch):
            hidden = model[1](model[0](batch[0]))
            half = hidden * 0.5 + hidden.detach() * 0.5
            return nn.functional.cross_entropy(model[2](half), batch[1], reduction="none")

        def describe(self):
            return Scaled().describe()

    begin(store, model, data, Scaled())
    with raises(CaptureError, "capture.function_changed", mentions="gradient of 0 off by"):
        go_on(store, model, data, Detached())


@pytest.mark.parametrize("encoding", ["plain", "bfloat16", "float16-scaled", "int8-scaled"])
@pytest.mark.parametrize("keep", [None, "dense", "low rank"])
def test_what_is_the_same_goes_on_however_it_is_kept(store, model, data, encoding, keep):
    options = {"encoding": encoding, "keep": keep, "tolerance": 1e-3 if keep == "low rank" else 0.0}
    begin(store, model, data, gk.Classification(), **options)
    assert go_on(store, model, data, gk.Classification(), **options).rows == ROWS
    assert go_on(store, model, data, gk.Classification(), **options).reused_rows == ROWS


def test_double_precision_goes_on(store, model, data):
    data = TensorDataset(data.tensors[0].double(), data.tensors[1])
    begin(store, model.double(), data, gk.Classification())
    assert go_on(store, model, data, gk.Classification()).rows == ROWS


def test_dropout_in_train_mode_is_not_held_against_a_run(store, data):
    drop = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    capture(store, drop, data, mode="train")
    assert capture(store, drop, data, mode="train").reused_rows == ROWS


@pytest.mark.parametrize("seed", range(6))
def test_any_change_of_contents_is_found_and_no_change_is_not(store, model, data, seed):
    """Against an oracle that compares the tensors: random rows, in inputs or labels."""
    capture(store, model, data)
    draw = np.random.default_rng(seed)
    for _ in range(6):
        x, y = (part.clone() for part in data.tensors)
        rows = draw.choice(ROWS, draw.integers(0, 4), replace=False)
        for row in rows:
            if draw.random() < 0.5:
                x[row, draw.integers(4)] += float(draw.choice([1e-6, 1.0]))
            else:
                y[row] = int(draw.integers(3))
        other = [
            r
            for r in range(ROWS)
            if not (x[r].equal(data.tensors[0][r]) and y[r] == data.tensors[1][r])
        ]
        if not other:
            assert capture(store, model, TensorDataset(x, y)).reused_rows == ROWS
            continue
        with raises(CaptureError, "capture.rows_changed", mentions=f"sample {other[0]} ") as caught:
            capture(store, model, TensorDataset(x, y))
        assert f"{len(other)} of {ROWS} rows" in caught.value.found
