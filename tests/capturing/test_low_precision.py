"""16-bit weights: the gradients of `model.float()`, without a second model in memory."""

import copy
import weakref

import pytest
import torch
from raises import raises
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep.capturing._readiness import WeightSource, full_precision_weights
from gradkeep.capturing._resume import fingerprint_weights
from gradkeep.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore:weights in:gradkeep.CaptureWarning")
OPTIONS = {"split": "train", "progress": False}


class Block(nn.Module):
    """Layers with rules, one that is run again for each sample, and weights that parents read."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = nn.Parameter(torch.rand(8))
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attend(y, y, y, need_weights=False)[0] * self.scale
        return x + F.linear(self.up(x).tanh(), self.down.weight)  # without calling the layer


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("temperature", torch.tensor(1.3))

    def forward(self, input_ids):
        return self.head(self.blocks(self.embed(input_ids))) / self.temperature


class Pictures(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(6)
        norm.running_mean.normal_()
        super().__init__(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.run, self.head = nn.GRU(5, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.run(x)[0][:, -1])


def speaker_batches():
    order = torch.Generator().manual_seed(1)
    return [torch.randint(11, (4, 6), generator=order) for _ in range(2)]


def labelled(*shape):
    order = torch.Generator().manual_seed(1)
    return [(torch.randn(4, *shape, generator=order), torch.arange(4) % 4) for _ in range(2)]


CASES = {
    "language": (Speaker, gk.LanguageModeling(), speaker_batches),
    "pictures": (Pictures, gk.Classification(), lambda: labelled(3, 6, 6)),
    "steps": (Steps, gk.Classification(), lambda: labelled(5, 5)),
}


def rows(store, name):
    result = gk.gradients(store, split="train", checkpoints=name)
    return result.restore(result.ids)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_is_what_the_widened_model_gives(store, case, kind):
    make, task, batches = CASES[case]
    model = make().to(kind).eval()
    wide = copy.deepcopy(model).float()
    before = fingerprint_weights(model)
    weights = dict(model.named_parameters())
    done = gk.capture(store, model, batches(), task=task, checkpoints="low", **OPTIONS)
    gk.capture(store, wide, batches(), task=task, checkpoints="wide", **OPTIONS)
    assert any(str(kind).removeprefix("torch.") in note for note in done.notes)
    low, high = rows(store, "low"), rows(store, "wide")
    assert low.keys() == high.keys() == dict(wide.named_parameters()).keys()
    for name, value in high.items():
        assert low[name].dtype == torch.float32
        error = (low[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert error < 1e-5, (name, float(error))
    losses = [store.read(gk.store.CaptureKey(n, "train")).column("loss") for n in ("low", "wide")]
    torch.testing.assert_close(*map(torch.from_numpy, losses), rtol=1e-6, atol=1e-6)
    # The model is as it was: the same parameters, types and values.
    assert fingerprint_weights(model) == before
    assert all(weights[name] is parameter for name, parameter in model.named_parameters())
    assert {p.dtype for p in model.parameters()} == {kind}


def test_frozen_16_bit_weights_below_an_adapter_are_widened_too(store):
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.base = nn.Linear(6, 6).bfloat16().requires_grad_(False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x):
            return self.up(self.down(self.base(x)))

    model, data = Adapted(), labelled(6)
    wide = copy.deepcopy(model).float()
    gk.capture(store, model, data, task=gk.Classification(), checkpoints="low", **OPTIONS)
    gk.capture(store, wide, data, task=gk.Classification(), checkpoints="wide", **OPTIONS)
    low, high = rows(store, "low"), rows(store, "wide")
    assert low.keys() == {"down.weight", "up.weight"}
    for name, value in high.items():
        torch.testing.assert_close(low[name], value, rtol=1e-5, atol=1e-7)


def test_a_finished_capture_of_16_bit_weights_is_known_again_and_checkpoints_are_loaded(store):
    model = Speaker().bfloat16()
    first, second = (Speaker().bfloat16().state_dict() for _ in range(2))
    second = {name: value * 2 for name, value in second.items()}
    options = {"task": gk.LanguageModeling(), **OPTIONS}
    values = {"one": first, "two": second}
    gk.capture(store, model, speaker_batches(), checkpoints=values, **options)
    repeated = gk.capture(store, model, speaker_batches(), checkpoints=values, **options)
    assert [(one.rows, one.reused_rows) for one in repeated] == [(8, 8)] * 2


def test_a_plan_and_a_list_of_layers_take_16_bit_models():
    model, batch = Speaker().bfloat16(), speaker_batches()[0]
    assert len(gk.plan(model, batch, task=gk.LanguageModeling(), rows=10).layers) > 5
    assert len(gk.layers(model, batch, task=gk.LanguageModeling())) > 5


def test_an_error_inside_leaves_the_model_as_it_was():
    model = Speaker().bfloat16()
    before = list(model.parameters())

    def broken():
        with full_precision_weights(model):
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert model.temperature.dtype == torch.bfloat16


def test_a_budget_by_fraction_needs_weights_as_they_are_computed_with(store):
    with raises(CaptureError, "capture.fraction_needs_float32", fix="memory_budget"):
        gk.capture(
            store,
            Speaker().bfloat16(),
            speaker_batches(),
            task=gk.LanguageModeling(),
            memory_budget=0.5,
            **OPTIONS,
        )


def test_a_recording_still_refuses_16_bit_weights(store):
    model = nn.Linear(4, 3).bfloat16()
    with (
        raises(CaptureError, "capture.low_precision"),
        gk.recording(store, model, checkpoints="now"),
    ):
        pass


def test_weights_that_were_never_loaded_are_refused(store):
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    with raises(CaptureError, "capture.weights_not_loaded"):
        gk.capture(
            store,
            model,
            [(torch.randn(2, 4), torch.tensor([0, 1]))],
            task=gk.Classification(),
            **OPTIONS,
        )


def test_no_second_model_is_held(store, monkeypatch):
    """Of all widened weights of a capture, those that live at one moment."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(20)]
    model = nn.Sequential(*layers, nn.Linear(64, 4)).bfloat16()
    live, most = [0], [0]
    value = WeightSource.value

    def counted(source):
        built = value(source)
        live[0] += built.nbytes
        most[0] = max(most[0], live[0])
        weakref.finalize(built, lambda size=built.nbytes: live.__setitem__(0, live[0] - size))
        return built

    monkeypatch.setattr(WeightSource, "value", counted)
    gk.capture(store, model, labelled(64), task=gk.Classification(), **OPTIONS)
    widened = sum(4 * p.numel() for p in model.parameters())
    assert live[0] == 0
    assert 0 < most[0] < 0.12 * widened
