"""Candidates by small codes, ranked by exact products, against the products of all rows."""

import dataclasses

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.errors import DamagedError, QueryError
from gradkeep.factors._dense import Dense
from gradkeep.factors._form import Parameter, form_to_fields
from gradkeep.query import _build_codes, _small_codes
from gradkeep.query._small_codes import QueryCoordinates, _largest


def captured(tmp_path, model, shape, rows=300, queries=6, **options):
    torch.manual_seed(0)
    store, net = gk.open(tmp_path), model()
    # A few directions that most of every row lies along, as gradients have them.
    leading = torch.randn(5, int(np.prod(shape)))
    for split, count in (("train", rows), ("test", queries)):
        x = (torch.randn(count, 5) * torch.logspace(1, 0, 5)) @ leading
        x = (x + 0.3 * torch.randn(x.shape)).view(count, *shape)
        data = [(x / 10, torch.arange(count) % 3)]
        gk.capture(
            store, net, data, task=gk.Classification(), split=split, progress=False, **options
        )
    return tuple(gk.gradients(store, split=split) for split in ("train", "test"))


MODELS = {
    "factors": (lambda: nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3)), (12,), {}),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(12, 3)),
        (1, 3, 4),
        {"keep": "dense"},
    ),
    "bits": (lambda: nn.Linear(800, 3), (800,), {"keep": gk.Keep("512B", coordinates="random")}),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("smallest", [False, True])
def test_the_best_are_those_of_all_rows(tmp_path, kind, smallest):
    model, shape, options = MODELS[kind]
    train, test = captured(tmp_path, model, shape, **options)
    codes = gk.query.small_codes(train, bytes=24)
    best = gk.query.top(test, train, 5, codes=codes, candidates=100, smallest=smallest)
    exact = gk.query.top(test, train, 5, smallest=smallest)
    shared = [
        len(set(a) & set(b)) for a, b in zip(best.ids.tolist(), exact.ids.tolist(), strict=True)
    ]
    assert sum(shared) >= 0.95 * exact.ids.numel()
    same = best.ids == exact.ids
    assert torch.allclose(best.values[same], exact.values[same], rtol=1e-4)


def dense_rows(tmp_path, rows, queries):
    """A store that keeps these vectors as they are, as rows and as queries."""
    weight = Dense((Parameter("w", (rows.shape[1],)),), "w.gradient", rows.shape[1])
    store = gk.open(tmp_path, durability="process")
    for split, values in (("train", rows), ("test", queries)):
        with store.write(gk.store.CaptureKey("final", split), dense_schema(weight)) as writer:
            writer.append(np.arange(len(values)) * 3, {"w.gradient": values.numpy()})
    return tuple(gk.gradients(store, split=split) for split in ("train", "test"))


def dense_schema(form):
    return gk.store.Schema(
        (gk.store.Array("w.gradient", shape=form.parameters[0].shape, kind="gradient", layer="w"),),
        rows_per_segment=16,
        layers=(gk.store.Layer("w", "Linear", form.parameters[0].size, form_to_fields(form)),),
        fingerprints={"weights": "w", "task": "t", "of": "loss"},
    )


def append(store, rows, first):
    form = gk.gradients(store, split="train").forms["w"]
    key = gk.store.CaptureKey("final", "train")
    with store.write(key, dense_schema(form), extend=True) as writer:
        writer.append(first + np.arange(len(rows)), {"w.gradient": rows.numpy()})


def recall(actual, exact):
    pairs = zip(actual.ids.tolist(), exact.ids.tolist(), strict=True)
    return np.mean([len(set(a) & set(b)) / len(b) for a, b in pairs])


@pytest.mark.parametrize("smallest", [False, True])
def test_rows_of_slowly_falling_directions_and_very_different_lengths_are_found(tmp_path, smallest):
    rng = torch.Generator().manual_seed(3)
    sizes = torch.arange(1, 257) ** -0.5
    rows = torch.randn(4000, 256, generator=rng) * sizes
    rows *= torch.exp(2 * torch.randn(4000, 1, generator=rng))
    queries = torch.randn(20, 256, generator=rng) * sizes
    train, test = dense_rows(tmp_path, rows, queries)
    codes = gk.query.small_codes(train, bytes=38, sample=512)
    assert 0.4 < codes.share < 0.9
    best = gk.query.top(test, train, 10, codes=codes, candidates=400, smallest=smallest)
    exact = gk.query.top(test, train, 10, smallest=smallest)
    assert recall(best, exact) >= 0.97


def test_long_rows_are_looked_at_though_their_codes_say_little(tmp_path):
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(3000, 40, generator=rng) * torch.cat([torch.ones(4), torch.full((36,), 0.1)])
    rows[100:140, :4] = 0
    rows[100:140, 4:] *= 1000  # along no leading direction
    query = torch.cat([torch.ones(4), torch.full((36,), 0.3)])[None]
    train, test = dense_rows(tmp_path, rows, query)
    codes = gk.query.small_codes(train, bytes=8, sample=64)
    coordinates = QueryCoordinates.of(test, codes, [0], smallest=False)
    exact = gk.query.top(test, train, 5).ids
    by_codes = 3 * codes.nearest(codes.products(coordinates), 30)
    assert not torch.isin(exact, by_codes).all()
    assert torch.equal(gk.query.top(test, train, 5, codes=codes, candidates=60).ids, exact)


@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize("candidates", [None, 90])
def test_with_all_rows_as_candidates_nothing_is_lost(tmp_path, smallest, candidates):
    rng = torch.Generator().manual_seed(1)
    # Whole numbers: many products are equal, and their order is that of the rows.
    rows = torch.randint(-1, 2, (90, 12), generator=rng).float()
    queries = torch.randint(-1, 2, (7, 12), generator=rng).float()
    train, test = dense_rows(tmp_path, rows, queries)
    codes = gk.query.small_codes(train, bytes=8)
    for k in (1, 7, 90, 1000):
        best = gk.query.top(test, train, k, codes=codes, candidates=candidates, smallest=smallest)
        exact = gk.query.top(test, train, k, smallest=smallest)
        assert torch.equal(best.ids, exact.ids)
        assert torch.equal(best.values, exact.values)
        one = gk.query.top(test, train, k, ids=[6], codes=codes, smallest=smallest)
        assert torch.equal(one.ids, exact.ids[2:3])


def test_nearest_are_those_of_decoded_codes(tmp_path):
    rng = torch.Generator().manual_seed(2)
    train, test = dense_rows(
        tmp_path, torch.randn(500, 30, generator=rng), torch.randn(5, 30, generator=rng)
    )
    codes = gk.query.small_codes(train, bytes=16)
    upper, lower = codes.codes.view(np.int8) >> 4, codes.codes & 15
    levels = np.concatenate([upper + 0.5, lower - 7.5], 1)
    units = torch.from_numpy(levels).float() * codes.steps
    part = codes.parts.float().unsqueeze(1) / 65535
    rows = units * codes.lengths.unsqueeze(1) * part.sqrt()
    coordinates = QueryCoordinates.of(test, codes, [0, 1, 2, 3, 4], smallest=False)
    values = coordinates.along @ rows.t()
    products = codes.products(coordinates)
    actual = codes.nearest(products, 40)
    assert torch.allclose(values.gather(1, actual), values.topk(40).values, rtol=1e-4, atol=1e-4)
    floor = values.topk(3).values[:, -1]
    unseen = (
        codes.lengths.square()
        * (1 - part[:, 0])
        * (codes.spread * coordinates.beyond[:, None]) ** 2
    )
    rounded = (coordinates.along * codes.steps).square().sum(1, keepdim=True) / 12
    error = (unseen + codes.lengths.square() * part[:, 0] * rounded).sqrt()
    likely = (values - floor[:, None]) / error
    actual = codes.likeliest(products, coordinates, floor, 40)
    assert torch.allclose(likely.gather(1, actual), likely.topk(40).values, rtol=1e-3, atol=1e-3)
    assert abs(float(units.norm(dim=1).mean()) - 1) < 0.03


@pytest.mark.parametrize("levels", [3, 50, 10**6])
def test_the_largest_of_many_are_those_of_a_stable_sort(levels):
    rng = torch.Generator().manual_seed(levels)
    values = torch.randint(levels, (3, 40_000), generator=rng).float()
    values[1, 100:] = -torch.inf
    exact = values.sort(dim=1, descending=True, stable=True).indices
    for count in (1, 10, 3000, 40_000):
        assert torch.equal(_largest(values, count), exact[:, :count])


def test_queries_in_groups_have_the_same_answers(tmp_path, monkeypatch):
    rows = torch.randn(100, 9, generator=torch.Generator().manual_seed(7))
    train, test = dense_rows(tmp_path, rows, rows[:7] + 0.1)
    codes = gk.query.small_codes(train, bytes=9)
    whole = gk.query.top(test, train, 3, codes=codes, candidates=20)
    monkeypatch.setattr(_small_codes, "_HELD", 8 * 100 * 2)
    parts = gk.query.top(test, train, 3, codes=codes, candidates=20)
    assert torch.equal(whole.ids, parts.ids)
    assert torch.allclose(whole.values, parts.values)


def test_codes_are_made_once_and_read_again(tmp_path):
    train, _ = captured(tmp_path, *MODELS["factors"][:2], rows=50)
    one = gk.query.small_codes(train, bytes=10)
    files = sorted(path.name for path in tmp_path.rglob("*.safetensors"))
    second_codes = gk.query.small_codes(train, bytes=10)
    assert np.array_equal(one.codes, second_codes.codes)
    assert torch.equal(one.lengths, second_codes.lengths)
    assert torch.allclose(one.lengths, train.norms(), rtol=1e-4)
    assert files == sorted(path.name for path in tmp_path.rglob("*.safetensors"))
    assert "50 rows, 10 bytes each" in repr(second_codes)
    assert 0.5 < second_codes.share <= 1.0001
    assert gk.store.verify(tmp_path).healthy
    other = gk.query.small_codes(train, bytes=10, sample=20, seed=1)
    assert not np.array_equal(one.codes, other.codes)
    assert np.array_equal(one.codes, gk.query.small_codes(train, bytes=10).codes)
    assert len(gk.open(tmp_path).bases()) == 4


def test_more_bytes_than_rows_are_empty_ones(tmp_path):
    train, test = captured(tmp_path, *MODELS["factors"][:2], rows=5)
    codes = gk.query.small_codes(train, bytes=16)
    assert all(not torch.any(directions[5:]) for directions in codes.directions.values())
    assert gk.query.top(test, train, 2, codes=codes).ids.shape == (6, 2)


def test_rows_of_length_zero_have_codes_too(tmp_path):
    rows = torch.randn(40, 6)
    rows[::2] = 0
    train, test = dense_rows(tmp_path, rows, -rows[1:2])
    codes = gk.query.small_codes(train, bytes=8)
    for k in (3, 40):
        best, exact = (gk.query.top(test, train, k, codes=by) for by in (codes, None))
        assert torch.equal(best.ids, exact.ids)
    still, _ = dense_rows(tmp_path / "still", torch.zeros(9, 6), torch.zeros(1, 6))
    with raises(QueryError, "query.zero_gradients"):
        gk.query.small_codes(still)


def test_after_rows_were_appended_or_dropped_codes_are_of_the_new_version(tmp_path, monkeypatch):
    rng = torch.Generator().manual_seed(4)
    rows = torch.randn(200, 20, generator=rng)
    train, test = dense_rows(tmp_path, rows, rows[:3] + 0.1)
    monkeypatch.setattr(_build_codes, "_TOGETHER", 1)
    encoded = []
    real = _build_codes._CodeBuilder._encode

    def counted(self, some, *rest):
        encoded.append(some.stop - some.start)
        return real(self, some, *rest)

    monkeypatch.setattr(_build_codes._CodeBuilder, "_encode", counted)
    old = gk.query.small_codes(train, bytes=12)
    assert sum(encoded) == 200
    store = gk.open(tmp_path)
    changes = (
        lambda: append(store, rows[:3] * 9, 1000),
        lambda: store.drop_rows(gk.store.CaptureKey("final", "train"), [0, 300, 1000]),
    )
    for change, most in zip(changes, (19, 60), strict=True):
        change()
        encoded.clear()
        newer = gk.gradients(store, split="train")
        with raises(QueryError, "query.codes_of_other_rows"):
            gk.query.top(test, newer, 2, codes=old)
        codes = gk.query.small_codes(newer, bytes=12)
        assert 0 < sum(encoded) <= most  # of the other segments they were known
        fresh = _build_codes._CodeBuilder(newer, 12, 4096, 0)
        computed = fresh._encode(newer.rows(range(len(newer))), fresh.directions(), None)
        assert np.array_equal(codes.codes, computed["code"])
        exact = gk.query.top(test, newer, 5)
        best = gk.query.top(test, newer, 5, codes=codes)
        assert torch.equal(best.ids, exact.ids)
        old = codes
    assert len(store.bases()) == 2  # the directions, and codes of the newest version


def test_codes_go_with_their_capture_and_are_not_taken_for_those_of_a_new_one(tmp_path):
    rng = torch.Generator().manual_seed(5)
    rows = torch.randn(40, 8, generator=rng)
    train, test = dense_rows(tmp_path, rows, rows[:2])
    old = gk.query.small_codes(train, bytes=8)
    store = gk.open(tmp_path)
    for split in ("train", "test"):
        store.delete(gk.store.CaptureKey("final", split))
    assert store.bases() == []
    train, test = dense_rows(tmp_path, -rows, rows[:2])
    with raises(QueryError, "query.codes_of_other_rows"):
        gk.query.top(test, train, 2, codes=old)
    codes = gk.query.small_codes(train, bytes=8)
    best = gk.query.top(test, train, 5, codes=codes)
    assert torch.equal(best.ids, gk.query.top(test, train, 5).ids)


def test_an_interrupted_call_is_gone_on_with(tmp_path, monkeypatch):
    rng = torch.Generator().manual_seed(6)
    rows = torch.randn(300, 10, generator=rng)
    train, _ = dense_rows(tmp_path / "one", rows, rows[:2])
    whole = gk.query.small_codes(train, bytes=12)
    monkeypatch.setattr(_build_codes, "_SEGMENT", 32)
    monkeypatch.setattr(_build_codes, "_TOGETHER", 3)
    train, _ = dense_rows(tmp_path / "two", rows, rows[:2])
    real, remaining = _build_codes._CodeBuilder._encode, [12]

    def broken(self, *values):
        remaining[0] -= 1
        if not remaining[0]:
            raise KeyboardInterrupt
        return real(self, *values)

    monkeypatch.setattr(_build_codes._CodeBuilder, "_encode", broken)
    with pytest.raises(KeyboardInterrupt):
        gk.query.small_codes(train, bytes=12)
    remaining[0] = 13  # of 19 segments of rows at least six are not made again
    second_codes = gk.query.small_codes(train, bytes=12)
    assert np.array_equal(second_codes.codes, whole.codes)
    assert torch.equal(second_codes.lengths, whole.lengths)


def test_damaged_codes_are_not_believed(tmp_path):
    rows = torch.randn(3000, 10)
    train, _ = dense_rows(tmp_path, rows, rows[:2])
    gk.query.small_codes(train, bytes=40)
    (path,) = tmp_path.rglob("*codes-40-*.v0*/seg/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError):
        gk.query.small_codes(train, bytes=40)


def test_codes_of_other_rows_are_refused(tmp_path):
    train, test = captured(tmp_path, *MODELS["factors"][:2], rows=20)
    codes = gk.query.small_codes(test, bytes=8)
    with raises(QueryError, "query.codes_of_other_rows"):
        gk.query.top(test, train, 2, codes=codes)
    codes = gk.query.small_codes(train, bytes=8)
    with raises(QueryError, "query.codes_options"):
        gk.query.top(test, train, 2, codes=codes, refine="main")
    with pytest.raises(QueryError, match="candidates"):
        gk.query.top(test, train, 2, codes=codes, candidates=0)
    with pytest.raises(QueryError, match="bytes"):
        gk.query.small_codes(train, bytes=6)
    few = dataclasses.replace(train, forms=dict(list(train.forms.items())[:1]))
    with raises(QueryError, "query.codes_of_other_layers"):
        gk.query.top(dataclasses.replace(test, forms=few.forms), few, 2, codes=codes)
