"""Moments of the first rows, beside a capture that keeps layers dense: what they are, and their life."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep.capturing import _rows
from gradkeep.curvature._moments import StoredMoments

KEY = gk.store.CaptureKey("final", "train")
ROWS = _rows.FIRST_ROWS


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    ).eval()


def batches(count=150, size=50, seed=1):
    chance = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 2, 6, 6, generator=chance), torch.arange(count) % 3
    return list(zip(x.split(size), y.split(size), strict=True))


def captured(folder, loader=None, **options):
    values = {"task": gk.Classification(), "split": "train", "progress": False} | options
    return gk.capture(folder, network(), batches() if loader is None else loader, **values)


def kept(folder):
    return StoredMoments.of(gk.gradients(gk.open(folder), split="train"))


def files(folder):
    root = folder / KEY.moments.folder / "seg"
    return {p.name: p.read_bytes() for p in sorted(root.iterdir())}


def by_hand(loader, rows):
    """Left and right moments of the convolution and the linear layer, in float64."""
    model, (x, y) = network().double(), (torch.cat(part) for part in zip(*loader, strict=True))
    x, y = x[:rows].double(), y[:rows]
    seen = {}

    def see(module, arguments, output):
        output.retain_grad()
        seen[module] = arguments[0].detach(), output

    for module in model:
        module.register_forward_hook(see)
    F.cross_entropy(model(x), y, reduction="sum").backward()
    pixels, out = seen[model[0]]
    patches = F.unfold(pixels, 3, padding=1).transpose(1, 2).reshape(-1, 18)
    values, logits = seen[model[3]]
    result = {}
    for name, a, g in (
        ("0", patches, out.grad.flatten(2).transpose(1, 2).reshape(-1, 4)),
        ("3", values, logits.grad),
    ):
        a = torch.cat([a, torch.ones(len(a), 1)], 1)
        result[name] = g.T @ g / rows, a.T @ a / len(a)
    return result


def check(result, expected):
    assert set(result.layers) <= set(expected)
    for name, one in result.layers.items():
        for side, other in zip((one.suffixes[0], one.prefixes[0]), expected[name], strict=True):
            torch.testing.assert_close(side.double(), other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("of", ["loss", "output"])
@pytest.mark.parametrize("size", [7, 50, 150])
def test_they_are_those_of_the_first_rows_whatever_the_batches(tmp_path, size, of):
    loader = batches(size=size)
    captured(tmp_path, loader, keep="dense", of=of)
    result = kept(tmp_path)
    assert result.rows == ROWS
    assert list(result.layers) == ["0", "3"]
    check(result, by_hand(loader, ROWS))


def test_of_few_rows_they_are_those_of_all_and_only_of_dense_layers(tmp_path):
    loader = batches(40)
    captured(tmp_path, loader)
    result = kept(tmp_path)
    assert (result.rows, list(result.layers)) == (40, ["0"])  # the last layer is kept as factors
    check(result, by_hand(loader, 40))


@pytest.mark.parametrize(
    "options", [{"keep": "factors"}, {"keep": "losses"}, {"keep": "1KiB"}, {"layers": "3"}]
)
def test_what_keeps_no_such_layer_dense_has_none(tmp_path, options):
    captured(tmp_path, batches(40), **options)
    assert not gk.open(tmp_path).has(KEY.moments)


@pytest.mark.parametrize("limit", ["_MOST_BYTES", "_MOST_TOGETHER", "_MOST_ROWS"])
def test_large_ones_are_not_kept(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(_rows, limit, 0)
    captured(tmp_path, batches(40))
    assert not gk.open(tmp_path).has(KEY.moments)


def test_a_byte_budget_bounds_them(tmp_path):
    captured(tmp_path, batches(40), memory_budget="80KB")
    assert not gk.open(tmp_path).has(KEY.moments)


@pytest.mark.parametrize("after", [1, 20, 23])
def test_an_interrupted_capture_ends_with_the_same_bytes(tmp_path, after, monkeypatch):
    loader, options = batches(size=6), {"memory_budget": "300KB"}
    captured(tmp_path / "whole", loader, **options)
    calls, original = iter(range(150)), _rows.RowFeed.add

    def torn(*values):
        if next(calls) == after:
            raise KeyboardInterrupt
        return original(*values)

    monkeypatch.setattr(_rows.RowFeed, "add", torn)
    with pytest.raises(KeyboardInterrupt):
        captured(tmp_path / "torn", loader, **options)
    monkeypatch.undo()
    assert not gk.open(tmp_path / "torn").has(KEY.moments)
    second = captured(tmp_path / "torn", loader, **options)
    assert (second.rows, second.reused_rows > 0) == (150, after > 1)
    assert files(tmp_path / "torn") == files(tmp_path / "whole")


def test_what_an_interrupted_run_left_is_replaced(tmp_path):
    captured(tmp_path / "other", batches(seed=2))
    store = gk.open(tmp_path / "whole")
    kept(tmp_path / "other").save(store, KEY)
    captured(tmp_path / "whole")
    check(kept(tmp_path / "whole"), by_hand(batches(), ROWS))


def test_a_finished_capture_from_before_them_stays_without(tmp_path):
    captured(tmp_path)
    store = gk.open(tmp_path)
    store.delete(KEY.moments)
    assert captured(tmp_path).reused_rows == 150
    assert not store.has(KEY.moments)
    assert "without moments (0)" in gk.attribute(store, method="ekfac", queries="train").approximate


def test_they_are_verified_listed_and_deleted_with_their_capture(tmp_path):
    captured(tmp_path)
    captured(tmp_path, split="test")
    store = gk.open(tmp_path)
    assert sorted(store.bases()) == sorted(key.moments for key in store.captures())
    assert gk.store.verify(store).healthy
    gk.store.gc(store)
    assert kept(tmp_path) is not None
    (segment,) = (tmp_path / KEY.moments.folder / "seg").iterdir()
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert not gk.store.verify(store).healthy
    segment.write_bytes(whole)
    store.delete(KEY)
    assert [key.split for key in store.captures()] == ["test"]
    assert len(store.bases()) == 1


@pytest.mark.parametrize(
    ("count", "ids", "text"),
    [
        (40, [], None),
        (40, [3, 30], "the first 40 rows, 2 of which were dropped since"),
        (150, [140], "the first 128 rows"),
        (150, [0, 127, 128], "the first 128 rows, 2 of which were dropped since"),
    ],
)
def test_scores_tell_of_moments_whose_rows_were_dropped(tmp_path, count, ids, text):
    captured(tmp_path, batches(count))
    store = gk.open(tmp_path)
    if ids:
        store.drop_rows(KEY, ids)
    result = gk.attribute(store, method="ekfac", queries="train").approximate
    whose = result.partition("eigenvectors are those of ")[2]
    assert whose == (text or "")


def test_moments_that_do_not_know_their_rows_say_so_once_rows_were_dropped(tmp_path):
    captured(tmp_path, batches(40))
    store = gk.open(tmp_path)
    result = StoredMoments.read(store, KEY)
    assert result.ids.tolist() == list(range(40))
    one = {name: result.layers[name] for name in result.layers}
    StoredMoments(one, result.rows, result.weights).save(
        store, KEY
    )  # as earlier versions kept them
    ask = {"method": "ekfac", "queries": "train"}
    assert "eigenvectors" not in gk.attribute(store, **ask).approximate
    store.drop_rows(KEY, [3])
    assert "some may have been dropped since" in gk.attribute(store, **ask).approximate


def test_a_store_calls_them_moments_and_no_bases(tmp_path):
    captured(tmp_path)
    gk.capture(
        *(tmp_path, network(), batches()),
        task=gk.Classification(),
        split="train",
        name="small",
        keep=gk.Keep(200, rows=16),
        progress=False,
    )
    info = gk.open(tmp_path).info()
    assert "1 set of moments, 1 basis," in info.title
    assert [len(info.moments), len(info.bases)] == [1, 1]
    fields = info.to_fields()
    assert [len(fields["moments"]), len(fields["bases"])] == [1, 1]
    kinds = [line.split()[0] for line in repr(info).splitlines() if ".moments-" in line]
    assert kinds == ["moments"]


def test_long_names_and_names_with_dots_have_their_own_place():
    keys = [
        gk.store.CaptureKey("final", "a.b", capture="c"),
        gk.store.CaptureKey("final", "a", capture="b.c"),
        gk.store.CaptureKey("final", "s" * 100, capture="c" * 100),
        gk.store.CaptureKey("final", "s" * 100, capture="c" * 99),
    ]
    assert len({key.moments for key in keys}) == 4


def test_rows_that_are_no_numbers_leave_the_layer_without(tmp_path):
    moments = _rows.FirstMoments
    original = moments.batch_sums

    def broken(self, piece, measured):
        result = original(self, piece, measured)
        result[0][0, 0, 0] = float("nan")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "batch_sums", broken)
        captured(tmp_path)
    assert not gk.open(tmp_path).has(KEY.moments)
