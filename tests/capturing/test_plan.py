"""Plans against what captures then take: bytes, advice, and models that hold no numbers."""

import copy
import math

import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.capturing._cost import plan_shapes
from gradkeep.capturing._first_batch import CaptureSettings, prepare_capture
from gradkeep.data import GPT
from gradkeep.errors import CaptureError
from gradkeep.store import BasisKey

WORDS, LENGTH = 300, 64


class Rotated(nn.Module):
    """A layer as Llama has it: fewer keys than queries, RMS norms, a gated feed-forward."""

    def __init__(self, dim, heads, groups):
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, dim // heads
        self.input_layernorm, self.post_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, groups * self.each, bias=False)
        self.v_proj = nn.Linear(dim, groups * self.each, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.gate_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.up_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.down_proj = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x):
        y = self.input_layernorm(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.each)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        y = self.post_layernorm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, dim)
        self.layers = nn.Sequential(*(Rotated(dim, 4, 2) for _ in range(2)))
        self.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, WORDS, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.norm(self.layers(self.embed_tokens(input_ids))))


class Branching(nn.Module):
    """Looks at numbers to decide what to do."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        y = self.low(x)
        return self.high(y if float(y.sum()) > 1e9 else y.tanh())


def make(kind):
    if kind in ("tied", "untied"):
        return GPT(vocabulary=WORDS, length=LENGTH, dim=32, heads=4, layers=2, tied=kind == "tied")
    if kind == "llama":
        return Llama()
    if kind == "mlp":
        return nn.Sequential(nn.Linear(200, 96), nn.ReLU(), nn.LayerNorm(96), nn.Linear(96, 10))
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 24, 3, stride=2), nn.Flatten(), nn.Linear(24 * 49, 10)),
    )


KINDS = ("tied", "untied", "llama", "mlp", "images")


def world(kind, rows=64):
    """A model, all rows, batches of eight and a task."""
    torch.manual_seed(0)
    model = make(kind).eval()
    if kind in ("mlp", "images"):
        size = (200,) if kind == "mlp" else (3, 16, 16)
        whole = torch.randn(rows, *size), torch.randint(10, (rows,))
        return (
            model,
            whole,
            list(zip(*(t.split(8) for t in whole), strict=True)),
            gk.Classification(),
        )
    tokens = torch.randint(WORDS, (rows, LENGTH))
    return model, tokens, list(tokens.split(8)), gk.LanguageModeling()


def on_meta(kind):
    with torch.device("meta"):
        model = make(kind).eval()
    _, whole, _, task = world(kind)
    batch = [t[:8].to("meta") for t in (whole if isinstance(whole, tuple) else (whole,))]
    return model, tuple(batch) if len(batch) > 1 else batch[0], task


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_exact_captures_are_foretold(kind, tmp_path):
    model, _, batches, task = world(kind)
    result = gk.plan(model, batches[0], task=task, rows=64, queries=0)
    report = gk.capture(tmp_path, model, batches, task=task, split="train")
    assert result.fits
    assert not result.advice
    assert result.disk_bytes == pytest.approx(report.bytes, rel=0.01)
    assert [p.layer.storage for p in result.layers] == [layer.storage for layer in report.layers]


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_tell_what_running_tells(kind):
    model, _, batches, task = world(kind)
    hollow, batch, _ = on_meta(kind)
    settings = CaptureSettings()
    proved = prepare_capture(model, task, batches[0], settings)
    for shaped in (
        plan_shapes(model, task, batches[0], settings),
        plan_shapes(hollow, task, batch, settings),
    ):
        assert shaped.prepared.row_bytes == pytest.approx(proved.row_bytes, rel=0.01)
        for one, other in zip(shaped.prepared.layers, proved.layers, strict=True):
            assert one.unit.name == other.unit.name
            assert (one.storage, one.unit.rule) == (other.storage, other.unit.rule)
            assert one.arrays == other.arrays
            # Of tokens that are not known, all may differ.
            assert other.row_bytes * 0.999 <= one.row_bytes <= other.row_bytes * 1.15


@pytest.mark.filterwarnings("ignore:ranks from what is kept")  # weights and labels are random
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    # A seed asks for coordinates also where whole gradients of few bits would fit.
    "keep",
    [gk.Keep("1KiB", seed=1), gk.Keep("2KiB", coordinates="random", bits=8)],
    ids=["1KiB", "random"],
)
@pytest.mark.parametrize("hollow", [False, True], ids=["run", "meta"])
def test_bytes_of_coordinates_are_foretold(kind, keep, hollow, tmp_path):
    model, _, batches, task = world(kind)
    values = on_meta(kind)[:2] if hollow else (model, batches[0])
    result = gk.plan(*values, task=task, rows=64, queries=0, keep=keep)
    report = gk.capture(tmp_path, model, batches, task=task, split="train", keep=keep)
    basis = gk.open(tmp_path).read(BasisKey("final")).manifest.bytes
    headers = result.disk_bytes - result.basis_bytes - 64 * result.row_bytes
    assert 64 * result.row_bytes + headers == pytest.approx(report.bytes, rel=0.05)
    assert result.basis_bytes == pytest.approx(basis, rel=0.25)
    assert {p.layer.storage for p in result.layers} == {"coordinates"}


def test_so_many_bytes_as_the_exact_rows_take_are_exact():
    model, _, batches, task = world("mlp")
    result = gk.plan(model, batches[0], task=task, rows=64, keep="1MiB")
    assert {p.layer.storage for p in result.layers} == {"factors", "dense"}
    assert result.basis_bytes == 0


@pytest.mark.parametrize("hollow", [False, True], ids=["run", "meta"])
def test_bytes_of_factors_in_few_bits_are_foretold(hollow, tmp_path):
    model, _, batches, task = world("mlp")
    values = on_meta("mlp")[:2] if hollow else (model, batches[0])
    result = gk.plan(*values, task=task, rows=64, queries=0, keep="1KiB")
    report = gk.capture(tmp_path, model, batches, task=task, split="train", keep="1KiB")
    assert result.disk_bytes == pytest.approx(report.bytes, rel=0.1)
    assert result.row_bytes <= 1024
    stored = [p.layer.storage for p in result.layers]
    assert stored == [layer.storage for layer in report.layers]
    assert set(stored) == {"factors", "dense"}


def test_a_model_without_numbers_stays_without():
    with torch.device("meta"):
        model = GPT(vocabulary=50257, length=1024, dim=768, heads=12, layers=12)
    batch = {"input_ids": torch.empty(2, 512, dtype=torch.int64, device="meta")}
    task = gk.LanguageModeling()
    result = gk.plan(model, batch, task=task, rows=100_000, queries=100, disk_budget="100GB")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not result.fits
    assert result.disk_bytes > 30e12
    assert result.capture_seconds > 0
    assert "keep='256KiB' fits" in result.advice
    assert result.advice in str(result)
    small = gk.plan(model, batch, task=task, rows=100_000, keep="256KiB", disk_budget="100GB")
    assert small.fits
    assert small.row_bytes == pytest.approx(256 * 1024, rel=0.01)


def test_what_does_not_fit_any_budget_is_said_with_figures():
    model, _, batches, task = world("llama")
    result = gk.plan(
        model, batches[0], task=task, rows=10**12, memory_budget="1MiB", disk_budget=10**6
    )
    assert not result.fits
    assert "on disk" in result.advice
    assert "queries take" in result.advice
    assert "no keep= fits" in result.advice
    assert math.isfinite(result.capture_seconds)


def test_a_budget_below_one_sample_is_answered():
    model, _, batches, task = world("tied")
    result = gk.plan(model, batches[0], task=task, rows=1000, memory_budget="100kB")
    assert not result.fits
    assert result.capture_memory > 100_000


def test_a_branch_on_numbers_is_planned_by_running_it():
    torch.manual_seed(0)
    model, batch = Branching(), (torch.randn(8, 6), torch.arange(8) % 3)
    before = copy.deepcopy(model.state_dict())
    result = gk.plan(model, batch, task=gk.Classification(), rows=100)
    assert [p.layer.name for p in result.layers] == ["low", "high"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with torch.device("meta"):
        hollow = Branching()
    with raises(CaptureError, "capture.needs_values"):
        gk.plan(hollow, batch, task=gk.Classification(), rows=100)


def test_real_batches_of_hollow_models_tell_how_many_tokens_differ():
    hollow, _, task = on_meta("untied")
    tokens = torch.arange(LENGTH).repeat(8, 1) % 4
    result = gk.plan(hollow, tokens, task=task, rows=10)
    table = next(p.layer for p in result.layers if p.layer.name == "wte")
    assert table.positions == 4


def test_a_basis_is_found_with_half_of_few_rows_but_with_positions_enough():
    keep = gk.Keep("4KiB", rows=96)
    assert [keep.sample(512, n) for n in (8, 31, 64, 100, 192, 10**6)] == [8, 31, 32, 50, 96, 96]
    assert [keep.sample(1, n) for n in (64, 100, 10**6)] == [64, 96, 96]
