"""Ids belong to contents: a loader's order is proved by what it delivers, not by its sampler's name."""

import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raises import raises
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import gradkeep as gk
from gradkeep.capturing._batches import iter_batches
from gradkeep.errors import CaptureError

KEY = gk.store.CaptureKey("final", "train")
ROWS = 40


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(3, ROWS)


def dataset():
    generator = torch.Generator().manual_seed(1)
    # Each label is its row's place, so that a stored label tells whose row it is.
    return TensorDataset(torch.randn(ROWS, 3, generator=generator), torch.arange(ROWS))


def capture(store, model, loader, **options):
    options = {"task": gk.Classification(), "split": "train", "progress": False} | options
    return gk.capture(store, model, loader, **options)


class Scrambled(Sampler):
    """Another order in every pass, by the random module of Python."""

    def __init__(self, rows, keep=0):
        self.rows, self.keep = rows, keep

    def __len__(self):
        return self.rows

    def __iter__(self):
        late = list(range(self.keep, self.rows))
        random.shuffle(late)
        return iter([*range(self.keep), *late])


class Seeded(Sampler):
    """The same other order in every pass."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __iter__(self):
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(5))
        return iter(order.tolist())


SHUFFLERS = {
    "random": lambda d: DataLoader(d, 8, shuffle=True),
    "batches": lambda d: DataLoader(d, batch_sampler=BatchSampler(RandomSampler(d), 8, False)),
    "subset": lambda d: DataLoader(d, 8, sampler=SubsetRandomSampler(range(ROWS))),
    "weighted": lambda d: DataLoader(d, 8, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)),
    "own": lambda d: DataLoader(d, 8, sampler=Scrambled(ROWS)),
    "own, late rows": lambda d: DataLoader(d, 8, sampler=Scrambled(ROWS, keep=34)),
    "own generator": lambda d: DataLoader(
        d, 8, sampler=RandomSampler(d, generator=torch.Generator().manual_seed(0))
    ),
}


@pytest.mark.parametrize("kind", SHUFFLERS)
def test_shuffling_loaders_are_refused_whatever_shuffles(store, model, kind):
    with raises(CaptureError, "capture.shuffled_loader"):
        capture(store, model, SHUFFLERS[kind](dataset()))
    assert store.captures() == []


@pytest.mark.parametrize("kind", SHUFFLERS)
def test_a_list_of_ids_does_not_belong_to_a_loader_that_shuffles(store, model, kind):
    with raises(CaptureError, "capture.shuffled_loader"):
        capture(store, model, SHUFFLERS[kind](dataset()), ids=range(ROWS))


@pytest.mark.parametrize("kind", [kind for kind in SHUFFLERS if kind != "weighted"])
def test_ids_in_the_batch_go_with_any_order(store, model, kind):
    x, y = dataset().tensors
    capture(store, model, SHUFFLERS[kind](TensorDataset(x, y, torch.arange(ROWS))), ids=2)
    block = store.read(KEY)
    assert (block.column("label") == block.ids).all()
    second = capture(store, model, SHUFFLERS[kind](TensorDataset(x, y, torch.arange(ROWS))), ids=2)
    assert second.reused_rows == ROWS


class Reversing(DataLoader):
    """A loader that changes what its parent delivers."""

    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


class SlowInTheMiddle(Dataset):
    """One of its batches is overtaken by others where a loader lets them."""

    def __len__(self):
        return ROWS

    def __getitem__(self, at):
        if ROWS // 2 <= at < ROWS // 2 + 4:
            time.sleep(0.1)
        return torch.full((3,), float(at)), at


@pytest.mark.parametrize(
    "loader",
    [
        lambda: Reversing(dataset(), 4),
        lambda: DataLoader(SlowInTheMiddle(), 4, num_workers=2, in_order=False),
    ],
    ids=["a subclass", "who comes first"],
)
def test_loaders_that_deliver_otherwise_than_they_draw_are_refused(store, model, loader):
    with pytest.raises(CaptureError) as caught:
        capture(store, model, loader())
    assert caught.value.code in ("capture.loader_differs", "capture.random_augmentation")


def test_workers_that_stay_for_the_next_pass_are_taken(store, model):
    loader = DataLoader(SlowInTheMiddle(), 4, num_workers=2, persistent_workers=True)
    capture(store, model, loader)
    assert store.read(KEY).column("label").tolist() == list(range(ROWS))


def test_rows_drawn_twice_are_refused(store, model):
    x, y = dataset().tensors
    torch.manual_seed(0)
    loader = SHUFFLERS["weighted"](TensorDataset(x, y, torch.arange(ROWS)))
    with pytest.raises(gk.GradkeepError, match=r"id .*(twice|before)"):
        capture(store, model, loader, ids=2)


@pytest.mark.parametrize(
    "sampler", [Seeded(ROWS), [*range(ROWS)][::-1], [*range(5, 20)]], ids=["seeded", "back", "some"]
)
def test_a_fixed_order_that_is_not_the_data_sets_needs_ids(store, model, sampler):
    loader = DataLoader(dataset(), 8, sampler=sampler)
    with raises(CaptureError, "capture.sampler_order") as caught:
        capture(store, model, loader)
    assert "ids=list(loader.sampler)" in caught.value.fix
    capture(store, model, loader, ids=list(loader.sampler))
    block = store.read(KEY)
    assert (block.column("label") == block.ids).all()


IN_ORDER = {
    "plain": lambda d: DataLoader(d, 8),
    "range": lambda d: DataLoader(d, 8, sampler=range(ROWS)),
    "batches": lambda d: DataLoader(d, batch_sampler=BatchSampler(SequentialSampler(d), 7, False)),
    "listed": lambda d: DataLoader(d, batch_sampler=[[0, 1, 2], [3], [*range(4, ROWS)]]),
    "worker": lambda d: DataLoader(d, 8, num_workers=1),
    "subset": lambda d: DataLoader(Subset(d, range(ROWS)), 9),
    "list": lambda d: [d[i : i + 8] for i in range(0, ROWS, 8)],
}


@pytest.mark.parametrize("kind", IN_ORDER)
def test_loaders_in_order_are_taken(store, model, kind):
    assert capture(store, model, IN_ORDER[kind](dataset())).rows == ROWS
    assert (store.read(KEY).column("label") == np.arange(ROWS)).all()


def test_a_loader_whose_data_set_gives_batches_is_taken(store, model):
    class Whole(Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, at):
            x, y = dataset().tensors
            return x[8 * at : 8 * at + 8], y[8 * at : 8 * at + 8]

    assert capture(store, model, DataLoader(Whole(), batch_size=None)).rows == ROWS
    assert (store.read(KEY).column("label") == np.arange(ROWS)).all()


class Noisy(Dataset):
    """Random augmentation: the same row, another picture."""

    def __len__(self):
        return ROWS

    def __getitem__(self, at):
        x, y = dataset()[at]
        return x + torch.randn(3), y


@pytest.mark.parametrize("ids", [None, range(ROWS)])
def test_random_augmentation_is_named(store, model, ids):
    with raises(CaptureError, "capture.random_augmentation") as caught:
        capture(store, model, DataLoader(Noisy(), 8), ids=ids)
    assert "shuffle" not in str(caught.value)
    assert store.captures() == []


def test_random_collation_is_named(store, model):
    def masked(rows):
        x, y = torch.utils.data.default_collate(rows)
        return x * (torch.rand_like(x) > 0.5), y

    with raises(CaptureError, "capture.random_augmentation"):
        capture(store, model, DataLoader(dataset(), 8, collate_fn=masked))


class Reordering(DataLoader):
    """Reorders what its sampler said, the same way in every pass."""

    def __iter__(self):
        batches = list(super().__iter__())
        yield from [*batches[:-2], batches[-1], batches[-2]]


def test_late_batches_in_another_order_are_found(store, model):
    with raises(CaptureError, "capture.loader_differs") as caught:
        capture(store, model, Reordering(dataset(), 8))
    assert "24" in str(caught.value)  # the first row that is another
    with pytest.raises(gk.GradkeepError, match="not finished"):
        gk.gradients(store, split="train")


class LateSwap(Sampler):
    """In order when it is looked at, and in the pass that is captured two late rows swapped."""

    def __init__(self, rows, honest):
        self.rows, self.honest = rows, honest

    def __len__(self):
        return self.rows

    def __iter__(self):
        self.honest -= 1
        places = list(range(self.rows))
        if self.honest < 0:
            places[21], places[22] = places[22], places[21]
        return iter(places)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ids", [None, list(range(200))])
def test_a_sampler_that_changes_its_mind_is_found_before_anything_is_written(
    store, model, workers, ids
):
    data = TensorDataset(torch.randn(200, 3), torch.arange(200) % ROWS)
    sampler = LateSwap(200, honest=3)  # asked twice, and for the first batches
    loader = DataLoader(data, 2, sampler=sampler, num_workers=workers)
    with raises(CaptureError, "capture.shuffled_loader") as caught:
        capture(store, model, loader, ids=ids)
    assert "row 22 at place 21" in str(caught.value) or "row 21 at place 22" in str(caught.value)
    assert store.captures() == []


@given(rows=st.integers(1, 40), size=st.integers(1, 9), last=st.booleans())
def test_a_watched_pass_is_the_loaders_own(rows, size, last):
    data = [(torch.randn(3), number) for number in range(rows)]
    loader = DataLoader(data, size, drop_last=last)
    delivered = rows - rows % size if last else rows
    watched = list(iter_batches(loader, list(range(delivered))))
    for ours, theirs in zip(watched, loader, strict=True):
        assert all(map(torch.equal, ours, theirs))


class Stream:
    """Batches of a stranger: `orders` says for each pass how rows come."""

    def __init__(self, *orders):
        self.orders, self.at = orders, -1

    def __iter__(self):
        self.at = min(self.at + 1, len(self.orders) - 1)
        order = torch.as_tensor(self.orders[self.at])
        x, y = dataset().tensors
        for part in order.split(8):
            yield x[part], y[part]


def test_streams_that_change_between_passes_are_refused(store, model):
    order = list(range(ROWS))
    assert capture(store, model, Stream(order)).rows == ROWS
    swapped = [1, 0, *range(2, ROWS)]
    with raises(CaptureError, "capture.shuffled_loader"):
        capture(store, model, Stream(order, swapped), name="other")


def test_a_data_set_that_only_streams_is_taken(store, model):
    class Rows(IterableDataset):
        def __iter__(self):
            return iter([dataset()[i] for i in range(ROWS)])

    assert capture(store, model, DataLoader(Rows(), 8)).rows == ROWS


def test_streams_that_change_between_checkpoints_are_refused(store, model):
    order = list(range(ROWS))
    late = [*range(30), *range(39, 29, -1)]
    weights = {name: dict(model.state_dict()) for name in ("a", "b")}
    with raises(CaptureError, "capture.rows_changed", mentions="sample 30 "):
        capture(store, model, Stream(order, order, late), checkpoints=weights)


@given(
    seed=st.integers(0, 2**32 - 1), size=st.integers(5, 50), kind=st.sampled_from(["swap", "all"])
)
def test_no_order_gives_a_row_anothers_id(tmp_path_factory, seed, size, kind):
    """Whatever order a sampler has, in each pass: it is refused, or every label has its own id."""
    draw = np.random.default_rng(seed)

    class Any(Sampler):
        def __len__(self):
            return ROWS

        def __iter__(self):
            order = np.arange(ROWS)
            if kind == "all":
                draw.shuffle(order)
            elif draw.random() < 0.7:
                one, two = draw.integers(0, ROWS, 2)
                order[[one, two]] = order[[two, one]]
            return iter(order.tolist())

    store = gk.open(tmp_path_factory.mktemp("any") / "store", durability="process")
    torch.manual_seed(0)
    try:
        capture(store, nn.Linear(3, ROWS), DataLoader(dataset(), size, sampler=Any()))
    except CaptureError:
        return
    block = store.read(KEY)
    assert (block.column("label") == block.ids).all()


def test_float_ids_are_refused(store, model):
    batches = [tuple(part[i : i + 8] for part in dataset().tensors) for i in range(0, ROWS, 8)]
    halves = np.arange(ROWS) + 0.5
    for ids in (halves, halves.tolist(), torch.from_numpy(halves), np.arange(ROWS) * 1.0):
        with pytest.raises(CaptureError, match="ids must be"):
            capture(store, model, batches, ids=ids)
    with_ids = [(x, y, y + 0.5) for x, y in batches]
    with pytest.raises(CaptureError, match="ids must be"):
        capture(store, model, with_ids, ids=2)
    with pytest.raises(CaptureError, match="ids must be"):
        capture(store, model, batches, ids=lambda batch: batch[0][:, 0])
    for bad in ([-1, *range(ROWS - 1)], [True] * ROWS, ["a"] * ROWS, [2**70] * ROWS, 1.5):
        with pytest.raises(CaptureError, match="ids"):
            capture(store, model, batches, ids=bad)
    assert store.captures() == []


def test_float_ids_of_a_recording_are_refused(store, model):
    with (
        pytest.raises(CaptureError, match="ids must be"),
        gk.recording(store, model, checkpoints="e") as rec,
        rec.batch([0.5, 1.5]),
    ):
        model(torch.randn(2, 3)).sum().backward()
