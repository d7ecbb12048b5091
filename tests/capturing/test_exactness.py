"""What is kept gives autograd's gradients, whatever the model, the batch size and the plan."""

import copy

import numpy as np
import pytest
import torch
from autograd_reference import per_sample_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradkeep as gk
from gradkeep.capturing._tracer import Tracer


def flat(gradients):
    return torch.cat([value.flatten(1) for value in gradients.values()], 1)


def oracle(model, batch, task, of=None):
    """Per-sample gradients `[B, P]` in float64, one sample at a time."""
    wide = copy.deepcopy(model).double()
    batch = tuple(x.double() if x.is_floating_point() else x for x in batch)
    tracer = Tracer(wide, task, of)
    return flat(per_sample_gradients(wide, lambda _, rows: tracer.measure(rows)[1], batch))


def kept(store, model, batch, task, *, split="train", batch_size=3, **options):
    parts = [
        tuple(x[at : at + batch_size] for x in batch) for at in range(0, len(batch[0]), batch_size)
    ]
    gk.capture(store, model, parts, task=task, split=split, progress=False, **options)
    return gk.gradients(store, split=split, name=options.get("name", "main"))


def error(result, truth):
    return float((result.double() - truth).norm() / truth.norm())


class Convolutions(nn.Module):
    """Strides, groups, dilation, padding modes, transposed, shared and normalised."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding="same", dilation=2, groups=4)
        self.round = nn.Conv2d(8, 4, (3, 1), padding=(1, 0), padding_mode="circular")
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.groups = nn.GroupNorm(2, 6)
        self.twice = nn.Conv2d(6, 6, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu_(self.norm(self.first(x)))
        x = self.round(self.grouped(x).relu())
        x = self.groups(self.up(x))
        return self.head(self.twice(self.twice(x).tanh()).mean((2, 3)))


class Tokens(nn.Module):
    """Embeddings with padding, attention of torch, a bare parameter, norms; perhaps a tied head."""

    def __init__(self, tied=False, first=True):
        super().__init__()
        self.token_embed = nn.Embedding(11, 8, padding_idx=0)
        self.places = nn.Parameter(torch.randn(6, 8))
        self.mix = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=first)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 11)
        self.first = first
        if tied:
            self.head.weight = self.token_embed.weight

    def forward(self, tokens):
        x = self.token_embed(tokens) + self.places[: tokens.shape[1]]
        x = x if self.first else x.transpose(0, 1)
        x = self.norm(self.mix(x))
        return self.head(x if self.first else x.transpose(0, 1))


class Recurrent(nn.Module):
    """A recurrent layer, and linear layers that are called twice."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(4, 5, batch_first=True)
        self.again = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        outputs, (last, _) = self.cells(x)
        return self.head(self.again(self.again(last[-1]).tanh())) + self.head(outputs[:, 0])


class Conv1D(nn.Module):
    """The linear layer of Hugging Face's GPT-2: its weight is laid out the other way."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.nf)


class Odd(nn.Module):
    """Layers without a rule, one that breaks its rule, and one that flattens samples and tokens."""

    def __init__(self):
        super().__init__()
        self.turned = Conv1D(6, 4)
        self.pair = nn.Bilinear(6, 6, 5)
        self.whiten = nn.InstanceNorm1d(4, affine=True)
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
        self.flat = nn.Linear(5, 5)
        self.head = DoubledLinear(5, 3)

    def forward(self, x):
        x = self.turned(self.whiten(x))
        x = self.weighted(self.pair(x, x.flip(1)))
        x = self.flat(x.reshape(-1, 5)).reshape(x.shape)
        return self.head(x.mean(1))


class DoubledLinear(nn.Linear):
    """A linear layer whose gradient is not that of its input and output alone."""

    def forward(self, x):
        return nn.functional.linear(x, 2 * self.weight, self.bias) + self.weight.sum(1)


def images(rows):
    return torch.randn(rows, 3, 8, 8), torch.randint(0, 3, (rows,))


def tokens(rows):
    drawn = torch.randint(1, 11, (rows, 6))
    lengths = torch.randint(2, 7, (rows, 1))
    seen = torch.where(torch.arange(6) < lengths, drawn, 0)
    return seen, torch.where(torch.arange(6) < lengths, drawn.roll(1, 1), -100)


def sequences(rows):
    return torch.randn(rows, 4, 4), torch.randint(0, 3, (rows,))


MODELS = {
    "convolutions": (Convolutions, images, gk.Classification()),
    "tokens": (Tokens, tokens, gk.LanguageModeling()),
    "tokens, mean loss": (Tokens, tokens, gk.LanguageModeling(reduction="mean")),
    "tokens, tied": (lambda: Tokens(tied=True), tokens, gk.LanguageModeling()),
    "tokens, samples second": (lambda: Tokens(first=False), tokens, gk.LanguageModeling()),
    "recurrent": (Recurrent, sequences, gk.Classification()),
    "odd": (Odd, sequences, gk.Classification()),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_every_sample_is_autograds(name, tmp_path):
    torch.manual_seed(0)
    make, draw, task = MODELS[name]
    model, batch = make().eval(), draw(7)
    # In batches of 3, so the last one is short.
    result = kept(gk.open(tmp_path), model, batch, task)
    truth = oracle(model, batch, task, of="loss")
    assert result.size == sum(p.numel() for p in model.parameters())
    restored = result.restore(result.ids)
    assert list(restored)
    assert set(restored) == {n for n, _ in model.named_parameters()}
    ordered = {n: restored[n] for n, _ in model.named_parameters()}
    assert error(flat(ordered), truth) < 1e-5
    assert torch.allclose(result.norms().double(), truth.norm(dim=1), rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_scores_do_not_depend_on_the_batch_size_or_the_plan(name, tmp_path):
    torch.manual_seed(1)
    make, draw, task = MODELS[name]
    model, batch, requests = make().eval(), draw(9), draw(4)
    truth = oracle(model, requests, task, "loss") @ oracle(model, batch, task, "loss").T
    store = gk.open(tmp_path)
    queries = kept(store, model, requests, task, split="test")
    for size in (1, 4, 9):
        train = kept(store, model, batch, task, batch_size=size, name=f"by-{size}")
        for plan in (None, "naive", "recon", "ted", "half"):
            result = gk.query.dot(queries, train, compute=plan)
            assert error(result.values, truth) < 1e-5, (size, plan)
    dense = kept(store, model, batch, task, name="dense", keep="dense")
    assert error(gk.query.dot(queries, dense).values, truth) < 1e-5
    assert {layer.form["kind"] for layer in dense.block.schema.layers} == {"dense"}


# torch itself says once in a process that such a geometry costs a copy.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_convolution_of_any_geometry_is_autograds(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    dims = data.draw(st.integers(1, 3))
    groups = data.draw(st.integers(1, 2))
    inner, outer = groups * data.draw(st.integers(1, 3)), groups * data.draw(st.integers(1, 3))
    kernel = data.draw(st.integers(1, 3))
    turned = data.draw(st.booleans())
    options = {
        "kernel_size": kernel,
        "stride": data.draw(st.integers(1, 3)),
        "dilation": data.draw(st.integers(1, 2)),
        "padding": data.draw(st.integers(0, kernel - 1)),
        "groups": groups,
        "bias": data.draw(st.booleans()),
    }
    name = f"Conv{'Transpose' if turned else ''}{dims}d"
    if not turned:
        options["padding_mode"] = data.draw(st.sampled_from(["zeros", "circular", "reflect"]))
        if options["stride"] == 1 and data.draw(st.booleans()):
            options["padding"] = "same"
    layer = getattr(nn, name)(inner, outer, **options)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).eval()
    batch = (torch.randn(4, inner, *(6,) * dims), torch.randint(0, 3, (4,)))
    model(batch[0])
    plan = data.draw(st.sampled_from(["factors", "dense", None]))
    result = kept(gk.open(_place()), model, batch, gk.Classification(), keep=plan)
    truth = oracle(model, batch, gk.Classification(), "output")
    restored = gk.query.Gradients(result.key, result.block, result.forms, "output").restore(
        result.ids
    )
    assert error(flat(restored), truth) < 1e-5
    how = data.draw(st.sampled_from(["naive", "recon", "ted", "half", None]))
    outputs = gk.query.Gradients(result.key, result.block, result.forms, "output")
    assert error(gk.query.dot(outputs, outputs, compute=how).values, truth @ truth.T) < 1e-5


def _place():
    from gradkeep.store import Memory

    return Memory()


def test_loss_and_output_gradients_come_from_one_capture(tmp_path):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
    batch = (torch.randn(6, 5), torch.randint(0, 4, (6,)))
    task = gk.Classification()
    store = gk.open(tmp_path)
    kept(store, model, batch, task)
    for of in ("loss", "output"):
        result = gk.gradients(store, split="train", of=of)
        truth = oracle(model, batch, task, of)
        assert error(flat(result.restore(result.ids)), truth) < 1e-5
        assert error(gk.query.gram(result).values, truth @ truth.T) < 1e-5


def test_a_sure_model_still_has_gradients_of_its_outputs(tmp_path):
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[200.0, 0, 0], [0, 0, 0]]))
    batch = (torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))
    result = kept(gk.open(tmp_path), model, batch, gk.Classification())
    outputs = gk.gradients(gk.open(tmp_path), split="train", of="output")
    assert (outputs.norms() > 1).all()
    assert (result.norms() < 1e-30).all()


def test_products_of_sums_cosines_and_top_k_are_those_of_the_matrix(tmp_path):
    torch.manual_seed(3)
    store, task = gk.open(tmp_path), gk.Classification()
    model = Convolutions().eval()
    train = kept(store, model, images(17), task)
    queries = kept(store, model, images(5), task, split="test")
    a = flat(queries.restore(queries.ids)).double()
    b = flat(train.restore(train.ids)).double()
    assert error(gk.query.cosine(queries, train).values, _cosines(a, b)) < 1e-5
    layers = gk.query.dot(queries, train, per_layer=True)
    assert layers.per_layer.shape == (len(train.forms), 5, 17)
    assert error(layers.per_layer.sum(0), a @ b.T) < 1e-5
    best = gk.query.top(queries, train, 4, memory_budget="64MiB")
    order = (a @ b.T).argsort(dim=1, descending=True)[:, :4]
    assert torch.equal(best.ids, torch.from_numpy(train.ids.copy())[order])
    worst = gk.query.top(queries, train, 2, smallest=True)
    assert torch.equal(worst.ids[:, 0], (a @ b.T).argmin(1))
    labels = train.column("label")
    means = gk.query.mean(train, by="label")
    for at, label in enumerate(means.groups):
        want = b[torch.from_numpy(labels == label)]
        assert error(_direction(means, at), want.mean(0)) < 1e-5
        spread = gk.query.variance(train, by=labels)
        assert error(_direction(spread, at), want.var(0, correction=0)) < 1e-4
    mean_query = gk.query.mean(queries)
    assert error(gk.query.along(train, mean_query)[0], b @ a.mean(0)) < 1e-5
    weights = np.random.default_rng(0).random(5)
    summed = gk.query.total(queries, weights=weights)
    assert error(gk.query.along(train, summed)[0], b @ (torch.tensor(weights) @ a)) < 1e-5


def _cosines(a, b):
    return (a / a.norm(dim=1, keepdim=True)) @ (b / b.norm(dim=1, keepdim=True)).T


def _direction(directions, at):
    return torch.cat([values[at].flatten() for values in directions.parameters().values()])


def test_checkpoints_are_summed_by_their_weights(tmp_path):
    torch.manual_seed(4)
    store, task = gk.open(tmp_path), gk.Classification()
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    states = {
        f"epoch-{n}": {k: torch.randn_like(v) for k, v in model.state_dict().items()}
        for n in range(3)
    }
    before = copy.deepcopy(model.state_dict())
    train, test = (
        (torch.randn(8, 4), torch.randint(0, 3, (8,))),
        (torch.randn(3, 4), torch.randint(0, 3, (3,))),
    )
    for split, batch in (("train", train), ("test", test)):
        gk.capture(
            store, model, [batch], task=task, split=split, checkpoints=states, progress=False
        )
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    queries = [gk.gradients(store, split="test", checkpoints=name) for name in states]
    rows = [gk.gradients(store, split="train", checkpoints=name) for name in states]
    lr = [0.1, 0.05, 0.01]
    truth = 0
    for state, weight in zip(states.values(), lr, strict=True):
        model.load_state_dict(state)
        truth = (
            truth
            + weight * oracle(model, test, task, "loss") @ oracle(model, train, task, "loss").T
        )
    assert error(gk.query.dot(queries, rows, weights=lr).values, truth) < 1e-5
    best = gk.query.top(queries, rows, 3, weights=lr)
    assert torch.equal(best.ids, truth.argsort(dim=1, descending=True)[:, :3])


@pytest.mark.parametrize(
    ("encoding", "bound"), [("bfloat16", 2e-2), ("float16-scaled", 2e-3), ("int8-scaled", 5e-2)]
)
def test_narrow_encodings_err_within_their_bound(encoding, bound, tmp_path):
    torch.manual_seed(5)
    model, batch, task = Convolutions().eval(), images(12), gk.Classification()
    result = kept(gk.open(tmp_path), model, batch, task, encoding=encoding)
    truth = oracle(model, batch, task, "loss")
    assert error(gk.query.gram(result).values, truth @ truth.T) < bound


def test_a_cut_rank_errs_no_more_than_its_tolerance(tmp_path):
    torch.manual_seed(6)
    model, batch = Tokens().eval(), tokens(10)
    task = gk.LanguageModeling()
    truth = oracle(model, batch, task, "loss")
    for tolerance in (0.3, 1e-2, 1e-5):
        store = gk.open(tmp_path / str(tolerance))
        result = kept(
            store,
            model,
            batch,
            task,
            keep={"head": "low rank", "mix.linear*": "svd"},
            tolerance=tolerance,
        )
        restored = {n: result.restore(result.ids)[n] for n, _ in model.named_parameters()}
        for name, value in restored.items():
            assert value.shape[0] == 10, name
        assert error(flat(restored), truth) <= tolerance + 1e-6
        assert result.forms["head"].error == tolerance


def test_layers_that_read_one_input_keep_it_once(tmp_path):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.out = nn.Linear(6, 3)

        def forward(self, x):
            weights = (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1)
            return self.out((weights @ self.v(x))[:, 0])

    torch.manual_seed(7)
    model, task = Attention(), gk.Classification()
    batch = (torch.randn(5, 3, 6), torch.randint(0, 3, (5,)))
    result = kept(gk.open(tmp_path), model, batch, task, keep="factors")
    names = [array.name for array in result.block.schema.arrays if array.kind == "prefix"]
    assert names == ["q.prefix", "out.prefix"]
    truth = oracle(model, batch, task, "loss")
    assert error(flat(result.restore(result.ids)), truth) < 1e-5
    products = gk.query.gram(result)
    assert error(products.values, truth @ truth.T) < 1e-5
    # Only the first token is looked at: of the queries one position is left.
    assert result.block.column("out.suffix").shape == (5, 3)
