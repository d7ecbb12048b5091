"""So many bytes a row: coordinates against autograd, bytes, bits, bases, and everything refused."""

import re

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import gradkeep as gk
from gradkeep.capturing._batches import batch_size
from gradkeep.capturing._coordinates import CoordinateMaker
from gradkeep.capturing._first_batch import (
    OVERHEAD,
    CaptureSettings,
    PreparedCapture,
    prepare_capture,
    row_footprint,
    rows_within,
)
from gradkeep.data import GPT
from gradkeep.errors import AttributionError, BudgetError, CaptureError, QueryError
from gradkeep.factors import form_from_fields

VOCABULARY = 13
# Data are noise here: there is hardly anything that ranks could agree on.
pytestmark = pytest.mark.filterwarnings("ignore:ranks from what is kept agree only")


class Recurrent(nn.Module):
    """A layer that no rule covers, between two that one does."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 6)
        self.cells = nn.GRU(6, 7, batch_first=True)
        self.head = nn.Linear(7, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.cells(self.table(tokens))[0])


def images(grouped):
    first = nn.Conv2d(3, 4, 3, padding=1)
    second = nn.Conv2d(4, 6, 3, groups=2) if grouped else nn.ConvTranspose2d(4, 6, 3)
    size = 6 * 16 if grouped else 6 * 64
    return nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(size, 5))


def world(kind, rows=24):
    """A model, batches of eight and a task."""
    torch.manual_seed(0)
    if kind in ("convolutions", "transposed"):
        model = images(grouped=kind == "convolutions")
        x, y = torch.randn(rows, 3, 6, 6), torch.randint(5, (rows,))
        return model, list(zip(x.split(8), y.split(8), strict=True)), gk.Classification()
    if kind == "positions":
        model = nn.Sequential(nn.Linear(50, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 4))
        x, y = torch.randn(rows, 50), torch.randint(4, (rows,))
        return model, list(zip(x.split(8), y.split(8), strict=True)), gk.Classification()
    model = Recurrent()
    if kind == "grouped":
        model = GPT(vocabulary=VOCABULARY, length=9, dim=24, heads=2, layers=1, tied=True).eval()
    if kind in ("tied", "untied"):
        model = GPT(
            vocabulary=VOCABULARY, length=9, dim=8, heads=2, layers=2, tied=kind == "tied"
        ).eval()
    tokens = torch.randint(VOCABULARY, (rows, 9))
    labels = tokens.clone()
    for row in range(rows):  # padding of all lengths
        labels[row, 9 - row % 4 :] = -100
    batches = [
        {"input_ids": t, "labels": y} for t, y in zip(tokens.split(8), labels.split(8), strict=True)
    ]
    return model, batches, gk.LanguageModeling()


KINDS = ("grouped", "tied", "untied", "recurrent", "convolutions", "transposed", "positions")
BYTES = {"grouped": 256, "tied": 700, "untied": 700, "recurrent": 600, "positions": 400}


def capture(store, kind, keep, split="train", **options):
    model, batches, task = world(kind)
    return gk.capture(
        store, model, batches, task=task, split=split, keep=keep, progress=False, **options
    )


def targets(model, batch, task, of):
    measured = task.measure(model, batch)
    return measured.outputs if of == "output" else measured.losses


def gradients(kind, of):
    """Every sample's whole gradient by parameter, in float64, one by one."""
    model, batches, task = world(kind)
    model = model.double()
    result = {name: [] for name, _ in model.named_parameters()}
    for batch in batches:
        for row in range(8):
            if isinstance(batch, dict):
                one = {name: value[row : row + 1] for name, value in batch.items()}
            else:
                one = (batch[0][row : row + 1].double(), batch[1][row : row + 1])
            model.zero_grad()
            targets(model, one, task, of).sum().backward()
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                result[name].append(
                    torch.zeros_like(parameter).flatten()
                    if gradient is None
                    else gradient.flatten()
                )
    return {name: torch.stack(parts) for name, parts in result.items()}


def oracle(block, basis, whole):
    """Coordinates by layer, from whole gradients and the arrays of the basis, entry by entry."""
    row = basis.read_rows(np.zeros(1, np.int64), list(basis.names))
    arrays = {name: torch.from_numpy(np.array(row[name])[0]) for name in basis.names}
    result = {}
    for layer in block.schema.layers:
        form = form_from_fields(layer.form)
        dense = torch.cat([whole[p.name] for p in form.parameters], 1)
        parts = []
        for at in range(9):
            if f"{layer.name}.{at}.left" not in arrays:
                continue
            remaining, right, weights, chosen = (
                arrays.get(f"{layer.name}.{at}.{part}")
                for part in ("left", "right", "weights", "chosen")
            )
            matrix = matrices(layer, dense, remaining, right)
            moved = (remaining.double().mT @ matrix @ right.double()).flatten(1)
            if chosen is None:
                chosen = torch.arange(moved.shape[1]).view(weights.shape)
            y = torch.zeros(len(dense), weights.shape[1], dtype=torch.float64)
            for fold in range(len(weights)):
                y += weights[fold].double() * moved[:, chosen[fold]]
            parts.append(y)
        result[layer.name] = torch.cat(parts, 1)
    return result


def matrices(layer, dense, remaining, right):
    """The gradient as matrices `[B, G, R, C]`, the bias as the last column; by hand."""
    groups, rows, cols = remaining.shape[0], remaining.shape[1], right.shape[1]
    biased = len(form_from_fields(layer.form).parameters) > 1 and cols > 1
    inner = cols - biased
    weight = dense[:, : groups * rows * inner].reshape(len(dense), groups, rows, inner)
    if not biased:
        return weight
    bias = dense[:, groups * rows * inner :].reshape(len(dense), groups, rows, 1)
    return torch.cat([weight, bias], 3)


@pytest.mark.parametrize("kind", ["grouped", "tied", "untied", "convolutions", "positions"])
@pytest.mark.parametrize("coordinates", ["eigen", "random", "sketch"])
def test_coordinates_are_those_of_autograd(store, kind, coordinates):
    size = BYTES.get(kind, 600)
    keep = gk.Keep(size, coordinates=coordinates, rows=16)
    capture(store, kind, keep, layers="*")
    capture(store, kind, "queries", split="asked")
    queries = store.read(gk.store.CaptureKey("final", "asked"))
    (key,) = store.bases()
    whole = gradients(kind, str(queries.schema.fingerprints["of"]))
    expected = oracle(queries, store.read(key), whole)
    assert expected
    result = gk.gradients(store, split="asked", of=queries.schema.fingerprints["of"])
    rows = result.rows(range(len(result)))
    for name, form in result.forms.items():
        values = form.restore(rows.factors[name]).double()
        error = (values - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_signs_of_coordinates_and_their_mean_size(store, kind):
    capture(store, kind, gk.Keep(BYTES.get(kind, 600), rows=16), layers="*")
    capture(store, kind, "queries", split="asked")
    gradients = gk.gradients(store, split="train", of=_of(store))
    queries = gk.gradients(store, split="asked", of=_of(store))
    a, b = gradients.rows(range(24)), queries.rows(range(24))
    plain = torch.cat([f.restore(b.factors[n]) for n, f in queries.forms.items()], 1)
    coded = torch.cat([f.restore(a.factors[n]) for n, f in gradients.forms.items()], 1)
    group = next(iter(gradients.forms.values())).group
    assert bool(group) == (kind == "grouped")
    if group:
        groups = plain.view(len(plain), -1, group)
        size, places = groups.abs().max(2)
        mean = size.mean(1, keepdim=True)
        signs = groups.gather(2, places.unsqueeze(2)).sign().squeeze(2)
        expected = torch.zeros_like(groups).scatter_(
            2, places.unsqueeze(2), (signs * mean).unsqueeze(2)
        )
        assert (coded - expected.flatten(1)).norm() < 0.05 * coded.norm()
    else:
        torch.testing.assert_close(coded.abs(), plain.abs().mean(1, keepdim=True).expand_as(coded))
        assert ((coded > 0) == (plain > 0)).float().mean() > 0.999
    norms = gradients.norms()
    slopes = gradients.slopes()
    lengths = coded.norm(dim=1) * (1 if slopes is None else slopes.abs())
    torch.testing.assert_close(norms, lengths, rtol=1e-4, atol=1e-6)


def _of(store):
    schema = store.read(gk.store.CaptureKey("final", "train")).schema
    return str(schema.fingerprints["of"])


@pytest.mark.parametrize("bits", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("size", [256, 700, "1KiB", 1001])
def test_a_row_takes_no_more_than_was_said(tmp_path, bits, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 240), nn.Tanh(), nn.Linear(240, 40))
    x, y = torch.randn(2000, 7, 40), torch.randn(2000, 7, 40)

    class Squares(gk.Task):
        def losses(self, model, batch):
            return (model(batch[0]) - batch[1]).square().sum((1, 2))

    report = gk.capture(
        gk.open(tmp_path),
        model,
        list(zip(x.split(500), y.split(500), strict=True)),
        task=Squares(),
        split="train",
        keep=gk.Keep(size, bits=bits, rows=16),
        progress=False,
    )
    limit = gk.Keep(size).row_bytes
    assert report.bytes / report.rows <= limit
    assert report.bytes / report.rows >= 0.7 * limit


def test_whole_gradients_are_kept_where_they_take_no_more(store):
    report = capture(store, "positions", "1MiB")
    assert {layer.storage for layer in report.layers} <= {"factors", "dense"}
    assert store.bases() == []


@pytest.mark.parametrize(("size", "encoding"), [(700, "bfloat16"), (400, "int8-scaled")])
def test_factors_of_few_bits_are_kept_where_they_fit(store, size, encoding):
    report = capture(store, "positions", size)
    assert {layer.storage for layer in report.layers} <= {"factors", "dense"}
    assert store.bases() == []
    schema = store.read(report.key).schema
    gradients = [array for array in schema.arrays if array.layer is not None]
    assert {array.encoding for array in gradients} == {encoding}
    assert sum(array.row_bytes for array in gradients) + OVERHEAD <= size
    asked = capture(store, "positions", "queries", split="asked")
    assert [layer.storage for layer in asked.layers] == [layer.storage for layer in report.layers]
    capture(store, "positions", "exact", name="whole")
    for method in ("dot", "ekfac"):
        scores = gk.attribute(store, queries="asked", method=method).numpy()
        expected = gk.attribute(store, queries="train", method=method, name="whole").numpy()
        assert np.linalg.norm(scores - expected) < 0.02 * np.linalg.norm(expected)
    assert capture(store, "positions", size).reused_rows == report.rows


@pytest.mark.parametrize(
    ("size", "levels", "error", "agreement"), [(280, 16, 0.25, 0.95), (250, 6, 0.5, 0.8)]
)
def test_factors_of_few_levels_are_kept_where_eight_bits_do_not_fit(
    store, size, levels, error, agreement
):
    report = capture(store, "positions", size)
    assert {layer.storage for layer in report.layers} <= {"factors", "dense"}
    assert store.bases() == []
    schema = store.read(report.key).schema
    assert sum(a.row_bytes for a in schema.arrays if a.layer is not None) + OVERHEAD <= size
    known = {layer.name: layer.form.get("levels") for layer in schema.layers}
    assert known == {"0": levels, "1": None, "3": levels}
    capture(store, "positions", "queries", split="asked")
    capture(store, "positions", "exact", name="whole")
    own, whole = (
        gk.gradients(store, split="train"),
        gk.gradients(store, split="train", name="whole"),
    )
    assert torch.equal(own.norms(), whole.norms())  # those before rounding
    ids = list(range(24))
    restored = own.restore(ids)
    for name, values in whole.restore(ids).items():
        assert (restored[name] - values).norm() < error * values.norm()
    for method in ("dot", "ekfac"):
        scores = gk.attribute(store, queries="asked", method=method)
        assert f"{levels} levels" in scores.approximate
        expected = gk.attribute(store, queries="train", method=method, name="whole").numpy()
        assert np.corrcoef(scores.numpy().ravel(), expected.ravel())[0, 1] > agreement
    assert capture(store, "positions", size).reused_rows == report.rows


def test_wide_layers_with_one_position_need_no_basis(store):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    model = nn.Sequential(model, nn.Linear(1024, 10))
    data = [(torch.randn(64, 784), torch.randint(10, (64,)))]
    report = gk.capture(
        store, model, data, task=gk.Classification(), split="train", keep="4KiB", progress=False
    )
    assert store.bases() == []
    assert report.bytes <= 64 * 4096


def test_a_convolution_with_many_positions_is_projected_once_per_row():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Flatten(), nn.Linear(16 * 1024, 2))
    batch = torch.randn(4, 16, 32, 32), torch.randint(2, (4,))
    settings = CaptureSettings(layers="0")
    (piece,) = prepare_capture(model, gk.Classification(), batch, settings).pieces.values()
    form, rows = piece.form, piece.rows
    (block,) = form.weight_blocks()
    left, right = torch.randn(1, 16, 16), torch.randn(1, 145, 145)
    with FlopCounterMode(display=False) as counter:
        values = form.between(rows, block, left, right)
    expected = left.mT @ block.matrices(form.restore(rows)) @ right
    torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-3)
    products = sum(
        flops
        for operator, flops in counter.get_flop_counts()["Global"].items()
        if "convolution" not in str(operator) or "backward" not in str(operator)
    )
    position_products = 2 * 4 * 1024 * 16 * 144
    assert products < 2 * position_products


def test_coordinates_stay_coordinates_where_a_basis_is_stored(store, monkeypatch):
    with monkeypatch.context() as patch:  # a version that always stored coordinates
        patch.setattr(PreparedCapture, "within", lambda *_: None)
        first = capture(store, "positions", 700)
    again = capture(store, "positions", 700)
    assert again.reused_rows == first.rows
    for split, keep in (("test", 700), ("asked", "queries")):
        report = capture(store, "positions", keep, split=split)
        assert {layer.storage for layer in report.layers} == {"coordinates"}


@pytest.mark.parametrize("kind", ["positions", "tied"])
def test_all_coordinates_unrounded_give_the_influence_of_kfac(store, kind, monkeypatch):
    model = world(kind)[0]
    size = sum(p.numel() for p in model.parameters())
    keep = gk.Keep(4 * size + 60, bits=32, fold=1, rows=24, damping=0.3)
    # A number of bytes that would do for the gradients themselves keeps those.
    monkeypatch.setattr(PreparedCapture, "fits_exactly", lambda *_: False)
    capture(store, kind, keep, layers="*", of="loss")
    capture(store, kind, "factors", of="loss", name="whole")
    result = gk.attribute(store, queries="train", method="ekfac")
    expected = gk.attribute(store, queries="train", method="kfac", damping=0.3, name="whole")
    error = np.linalg.norm(result.numpy() - expected.numpy()) / np.linalg.norm(expected.numpy())
    assert error < 0.02


def test_ranks_come_near_those_of_whole_gradients_and_the_agreement_says_how_near(store):
    capture(store, "tied", "exact", name="whole")
    expected = gk.attribute(store, queries="train", name="whole", damping=0.1).numpy()
    near = {}
    for size in (256, 1024):
        keep = gk.Keep(size, bits=8, rows=24)
        capture(store, "tied", keep, name=f"k{size}", layers="*")
        capture(store, "tied", "queries", split="asked", name=f"k{size}")
        scores = gk.attribute(store, queries="asked", name=f"k{size}")
        assert scores.method == "ekfac"
        assert not scores.exact
        text = float(re.search(r"ranks agree (\S+)", scores.approximate)[1])
        order = np.argsort(np.argsort(scores.numpy(), 1), 1), np.argsort(np.argsort(expected, 1), 1)
        near[size] = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(*order, strict=True)])
        assert abs(text - near[size]) < 0.2
    assert near[1024] > near[256]
    assert near[1024] > 0.6


def test_what_products_mean_decides_what_can_be_asked(store):
    capture(store, "tied", gk.Keep(600, rows=16))
    capture(store, "tied", "queries", split="test")
    for method in ("dot", "cos", "tracin", "influence", "logra", "self"):
        with pytest.raises(AttributionError, match="whitened coordinates"):
            gk.attribute(store, method=method)
    for method in ("ekfac", "kernel", "trak", "loss"):
        scores = gk.attribute(store, method=method)
        assert "whitened coordinates, one bit each" in scores.approximate
        assert np.isfinite(scores.numpy()).all()
    unit = gk.attribute(store, method="ekfac", unit_norm=True).numpy()
    assert np.abs(unit).max() <= 1 + 1e-5
    with pytest.raises(AttributionError, match="fixed when they are captured"):
        gk.attribute(store, method="ekfac", damping=1.0)
    layered = gk.attribute(store, method="ekfac", per_layer=True)
    np.testing.assert_allclose(layered.per_layer.sum(0), layered.numpy(), rtol=1e-4, atol=1e-5)


def test_questions_about_coordinates_are_answered_or_refused(store):
    capture(store, "tied", gk.Keep(600, rows=16))
    rows = gk.gradients(store, split="train")
    with pytest.raises(QueryError, match="cannot be restored"):
        rows.restore([1])
    mean = gk.query.mean(rows)
    with pytest.raises(QueryError, match="cannot be restored"):
        mean.parameters()
    values = torch.cat(
        [f.restore(rows.rows(range(24)).factors[n]) for n, f in rows.forms.items()], 1
    )
    whole = torch.cat(list(mean.layers.values()), 1)
    torch.testing.assert_close(whole[0].float(), values.mean(0), rtol=1e-3, atol=1e-5)
    products = gk.query.along(rows, mean)[0]
    torch.testing.assert_close(products, values @ values.mean(0), rtol=1e-3, atol=1e-3)
    spread = torch.cat(list(gk.query.variance(rows).layers.values()), 1)[0].float()
    torch.testing.assert_close(spread, values.var(0, correction=0), rtol=1e-3, atol=1e-4)
    squares = torch.cat(list(gk.query.squares(rows).layers.values()), 1)[0].float()
    torch.testing.assert_close(squares, values.square().sum(0), rtol=1e-3, atol=1e-3)
    gram = gk.query.gram(rows).values
    torch.testing.assert_close(gram, values @ values.t(), rtol=1e-3, atol=1e-2)
    best = gk.query.top(rows, rows, 2).ids
    assert best.tolist() == gram.topk(2).indices.tolist()


def test_random_coordinates_estimate_products_of_gradients(store):
    keep = gk.Keep("2KiB", coordinates="random", bits=16)
    capture(store, "tied", keep, layers="*")
    capture(store, "tied", "exact", name="whole")
    result = gk.attribute(store, queries="train", method="dot").numpy()
    expected = gk.attribute(store, queries="train", method="dot", name="whole").numpy()
    assert np.corrcoef(result.ravel(), expected.ravel())[0, 1] > 0.7
    capture(store, "tied", "exact", split="test")
    with pytest.raises(QueryError, match=r"different layers|another basis"):
        gk.attribute(store, method="dot")


def test_one_basis_serves_all_splits_and_can_serve_all_checkpoints(store):
    capture(store, "tied", gk.Keep(600, rows=16), checkpoints="early")
    (key,) = store.bases()
    before = store.read(key).schema.fingerprints["basis"]
    capture(store, "tied", gk.Keep(600, rows=16), split="test", checkpoints="early")
    keep = gk.Keep(600, rows=16, basis="early")
    capture(store, "tied", keep, checkpoints="late")
    assert store.bases() == [key]
    for where in (("early", "train"), ("early", "test"), ("late", "train")):
        schema = store.read(gk.store.CaptureKey(*where)).schema
        assert schema.fingerprints["basis"] == before


def test_what_does_not_belong_together_is_refused(store):
    with raises(CaptureError, "capture.no_basis"):
        capture(store, "tied", "queries")
    with raises(CaptureError, "capture.too_few_bytes_per_row"):
        capture(store, "tied", "100B")
    with raises(CaptureError, "capture.keep_not_bytes"):
        capture(store, "tied", "4 parsecs")
    with raises(CaptureError, "capture.keep_with_encoding"):
        capture(store, "tied", "1KiB", encoding="bfloat16")
    assert store.blocks() == []
    capture(store, "tied", gk.Keep(600, rows=16))
    with raises(CaptureError, "capture.other_keep"):
        capture(store, "tied", gk.Keep(600, rows=16, seed=1), split="test")
    model, batches, task = world("tied")
    with torch.no_grad():
        model.wte.weight.add_(0.1)
    with raises(CaptureError, "capture.basis_weights"):
        gk.capture(store, model, batches, task=task, split="t", keep="queries", progress=False)
    other = gk.LanguageModeling(reduction="mean")
    model, batches, _ = world("tied")
    with raises(CaptureError, "capture.basis_task"):
        gk.capture(store, model, batches, task=other, split="t", keep="queries", progress=False)
    with pytest.raises(CaptureError) as caught:
        capture(store, "untied", "queries", split="t")
    assert caught.value.code in ("capture.basis_layers", "capture.basis_weights")
    assert [key.split for key in store.captures()] == ["train"]


def test_losses_that_are_no_numbers_leave_nothing(store):
    model, batches, task = world("tied")
    with torch.no_grad():
        model.wte.weight[3] = torch.nan
    with pytest.raises(CaptureError) as caught:
        gk.capture(store, model, batches, task=task, split="t", keep="600B", progress=False)
    assert caught.value.code in (
        "capture.not_finite",
        "capture.infinite_basis_loss",
        "capture.infinite_basis",
        "capture.zero_basis",
        "capture.gradients_do_not_add_up",
    )
    assert store.captures() == []


def test_a_changed_activation_is_noticed_on_a_rerun(store):
    keep = gk.Keep(300, rows=16)
    capture(store, "positions", keep)
    model, batches, task = world("positions")
    model[2] = nn.ReLU()
    with raises(CaptureError, "capture.function_changed"):
        gk.capture(store, model, batches, task=task, split="train", keep=keep, progress=False)


def test_done_twice_it_is_done_once(store):
    keep = gk.Keep(600, rows=16)
    first = capture(store, "tied", keep)
    second = capture(store, "tied", keep)
    assert second.reused_rows == first.rows == 24


def test_a_memory_budget_drops_activations_and_changes_nothing(tmp_path):
    plain, small = gk.open(tmp_path / "plain"), gk.open(tmp_path / "small")
    keep = gk.Keep(600, rows=16)
    capture(plain, "tied", keep)
    capture(small, "tied", keep, memory_budget=0.8)
    a, b = (s.read(gk.store.CaptureKey("final", "train")) for s in (plain, small))
    for name in a.names:
        one, other = a.column(name), b.column(name)
        assert np.array_equal(np.asarray(one), np.asarray(other)), name


def test_ranks_that_hardly_agree_are_warned_of(store):
    with pytest.warns(gk.CaptureWarning, match=r"agree only .* on \d+ rows"):
        capture(store, "positions", gk.Keep(200, bits=32, rows=16))


def test_functional_forms_of_the_dial(store):
    assert gk.Keep("4KiB").coordinate_bytes == 4096 - 80
    assert gk.Keep("4KiB", bits=4).sums == 2 * (4096 - 80)
    assert gk.Keep(4096) == gk.Keep("4KiB")
    report = capture(store, "tied", 600, name="number")
    assert all(layer.storage == "coordinates" for layer in report.layers)


def test_a_budget_in_bytes_counts_what_coordinates_hold(tmp_path, monkeypatch):
    """More rows at once than whole factors would allow, the same rows, and an error below one."""
    torch.manual_seed(0)
    model = GPT(vocabulary=50, length=32, dim=32, heads=2, layers=2, tied=True).eval()
    batches = [torch.randint(50, (32, 32)) for _ in range(2)]
    options = {"task": gk.LanguageModeling(), "keep": "1KiB", "progress": False}
    ran = []
    make = CoordinateMaker.make

    def seen(self, batch, **options):
        ran.append(batch_size(batch))
        return make(self, batch, **options)

    monkeypatch.setattr(CoordinateMaker, "make", seen)
    store = gk.open(tmp_path)
    gk.capture(store, model, batches, split="train", **options)
    assert max(ran) == 32
    ran.clear()
    gk.capture(store, model, batches, split="again", memory_budget="12MiB", **options)
    result = max(ran)
    assert 2 < result < 32
    prepared = prepare_capture(model, options["task"], batches[0][:2], CaptureSettings())
    assert result > rows_within(12 << 20, row_footprint(prepared, batches[0][:2], 2))
    free, bound = (gk.gradients(store, split=split).rows(range(64)) for split in ("train", "again"))
    for name in free.factors:
        same = (free.factors[name].codes == bound.factors[name].codes).float().mean()
        assert same > 0.99  # a place may change where the two largest are equal but for rounding
    with pytest.raises(BudgetError, match="at least"):
        gk.capture(store, model, batches, split="other", memory_budget="1MiB", **options)
    with pytest.raises(BudgetError, match="at least"):  # also where the basis is yet to be found
        gk.capture(
            store, model, batches, split="train", memory_budget="1MiB", name="other", **options
        )
    small = options | {"name": "small", "memory_budget": "8MiB"}
    assert gk.capture(store, model, batches, split="train", **small).rows == 64
