"""Captures and scores that version 0.1.0 wrote: read, asked, resumed, never done again.

All numbers in them are whole, so that every order of summation, on every machine, gives the same
bytes. Only lengths are not: torch rounds square roots of float32 differently on different processors,
so that they are compared to the last digit, and everything else to the bit.
"""

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from raises import raises
from torch import nn

import gradkeep as gk

ARCHIVE = Path(__file__).with_name("captures-0.1.0.zip")


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1, stride=2)
        self.fc = nn.Linear(8, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.fc(self.conv(x).relu().flatten(1)).relu()).squeeze(1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.mix(self.embed(ids)).relu().sum(1)).squeeze(1)


class HalfSquares(gk.Task):
    def losses(self, model, batch):
        x, y = batch
        return (model(x) - y).square()

    def describe(self):
        return "golden.HalfSquares()"


def filled(model):
    with torch.no_grad():
        for parameter in model.parameters():
            values = (torch.arange(parameter.numel()) * 7 + 3) % 5 - 2
            parameter.copy_(values.float().view(parameter.shape))
    return model


def pixels(count, start=0):
    places = torch.arange(start * 16, (start + count) * 16)
    x = ((places * 11 + 5) % 7 - 3).float().view(count, 1, 4, 4)
    return x, (torch.arange(start, start + count) % 5).float()


def words(count, start=0):
    ids = ((torch.arange(start * 5, (start + count) * 5) * 5 + 1) % 6).view(count, 5)
    return ids, (torch.arange(start, start + count) % 3).float()


MODELS = {"pixels": (Pixels, pixels), "words": (Words, words)}


def batches(data, size=4):
    return [tuple(part[i : i + size] for part in data) for i in range(0, len(data[0]), size)]


def capture(store, kind, *, split="train", rows=12, start=0, **options):
    model, make = MODELS[kind]
    common = {"task": HalfSquares(), "run": kind, "step": 3, "lr": 0.5, "progress": False}
    loader = batches(make(rows, start))
    return gk.capture(store, filled(model()), loader, split=split, **common, **options)


@pytest.fixture
def then(tmp_path):
    """The folder that 0.1.0 left."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path / "then")
    return tmp_path / "then"


def segments(store, kind, name, split="train"):
    folder = store / "blocks" / kind / "final" / split / name / "seg"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


LENGTHS = ("norm", "norms")


def layout(content):
    """The header of a segment without its checksums."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return {**header, "__metadata__": sorted(header["__metadata__"])}


def assert_same_segments(actual, expected):
    assert list(actual) == list(expected)
    for name, content in expected.items():
        assert layout(actual[name]) == layout(content)
        now, then = (safetensors.numpy.load(part) for part in (actual[name], content))
        for array, values in then.items():
            if array in LENGTHS:
                np.testing.assert_array_max_ulp(now[array], values)
            else:
                assert now[array].tobytes() == values.tobytes(), array


def test_the_store_opens_and_is_healthy(then):
    verdict = gk.store.verify(gk.open(then / "store", create=False))
    assert verdict.healthy, verdict


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_scores_come_out(then, kind):
    expected = np.load(then / "expected.npz")
    for method in ("dot", "self", "kernel", "trak", "ekfac"):
        scores = gk.attribute(then / "store", method=method, run=kind).numpy()
        expected_value = expected[f"{kind}.{method}"]
        np.testing.assert_allclose(
            scores, expected_value, rtol=1e-4, atol=1e-5 * np.abs(expected_value).max()
        )
        if method in ("dot", "self"):
            assert (scores == expected_value).all()


def test_saved_scores_are_read(then):
    scores = gk.Scores.load(gk.open(then / "store"), "dots")
    assert (scores.numpy() == np.load(then / "expected.npz")["pixels.dot"]).all()
    assert scores.method == "dot"
    assert scores.checkpoints == ("pixels/final",)


@pytest.mark.parametrize("kind", MODELS)
def test_a_finished_capture_is_not_done_again(then, kind):
    before = segments(then / "store", kind, "main")
    stored_capture = capture(then / "store", kind)
    assert stored_capture.reused_rows == stored_capture.rows == 12
    assert segments(then / "store", kind, "main") == before
    changed = batches(MODELS[kind][1](12, start=1))
    with raises(gk.GradkeepError, "capture.rows_changed"):
        gk.capture(
            then / "store",
            filled(MODELS[kind][0]()),
            changed,
            task=HalfSquares(),
            split="train",
            run=kind,
            step=3,
            lr=0.5,
            progress=False,
        )


@pytest.mark.parametrize("kind", MODELS)
def test_a_capture_that_was_begun_goes_on_to_the_same_bytes(then, kind):
    begun = segments(then / "store", kind, "begun")
    whole = segments(then / "store", kind, "whole")
    assert len(begun) < len(whole)
    stored_capture = capture(then / "store", kind, name="begun", ids=list(range(12)))
    assert stored_capture.reused_rows == 8
    assert_same_segments(segments(then / "store", kind, "begun"), whole)


@pytest.mark.parametrize("kind", MODELS)
def test_a_new_capture_writes_the_bytes_of_then(then, kind, tmp_path):
    new = tmp_path / "new"  # mode=None: 0.1.0 left the model in its own mode
    capture(new, kind, mode=None)
    capture(new, kind, mode=None, split="test", rows=4, start=40)
    capture(new, kind, mode=None, name="dense", keep="dense")
    for split, name in (("train", "main"), ("test", "main"), ("train", "dense")):
        before = segments(then / "store", kind, name, split)
        assert_same_segments(segments(new, kind, name, split), before)
        schema = Path("blocks", kind, "final", split, name, "schema.json")
        assert (new / schema).read_bytes() == (then / "store" / schema).read_bytes()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["main", "dense"])
def test_the_same_rows_are_written_as_the_same_bytes(then, kind, name, tmp_path):
    key = gk.store.CaptureKey("final", "train", kind, name)
    block = gk.open(then / "store").read(key)
    with gk.open(tmp_path / "new").write(key, block.schema) as writer:
        for batch in block.stream(batch_rows=4):
            writer.append(batch.ids, {array: batch[array] for array in block.names})
    before = segments(then / "store", kind, name)
    assert segments(tmp_path / "new", kind, name) == before


def test_old_and_new_rows_meet_in_one_question(then, tmp_path):
    shutil.rmtree(then / "store" / "blocks" / "words" / "final" / "test")
    capture(then / "store", "words", split="test", rows=4, start=40)
    scores = gk.attribute(then / "store", method="dot", run="words").numpy()
    assert (scores == np.load(then / "expected.npz")["words.dot"]).all()
