"""Batches unlike the first one: every stored row is right, or the capture is refused."""

import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.errors import BudgetError, CaptureError, GradkeepError

WORDS, WIDTH = 11, 6


class TokenLoss(gk.Task):
    """Sum of squared outputs weighted by the labels, one loss per row."""

    def losses(self, model, batch):
        return (model(*batch[:-1]) * batch[-1]).square().sum(1)


class ByLength(nn.Module):
    """Sorts its rows by length, runs the layers on the sorted rows and restores the order."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, 5), nn.Linear(5, 3)

    def forward(self, x, lengths):
        order = torch.argsort(lengths, descending=True, stable=True)
        inside = torch.arange(x.shape[1]) < lengths[order, None]
        hidden = torch.tanh(self.inner(x[order])) * inside.unsqueeze(2)
        return self.head(hidden.sum(1))[torch.argsort(order)]


class TimeMajor(nn.Module):
    """A decoder that flattens `[T, B, d]` to `[T * B, d]` before its linear layers."""

    def __init__(self):
        super().__init__()
        self.table, self.inner, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, 5),
            nn.Linear(5, 3),
        )

    def forward(self, tokens):
        rows, length = tokens.shape
        hidden = self.table(tokens.t()).view(length * rows, WIDTH)
        out = self.head(torch.tanh(self.inner(hidden)))
        return out.view(length, rows, 3).sum(0)


class Experts(nn.Module):
    """Each row goes to one expert; `capacity` rows at most, the others pass unchanged."""

    def __init__(self, capacity=None):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head, self.capacity = nn.Linear(WIDTH, 3), capacity

    def forward(self, x, chosen):
        out = x
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()[: self.capacity]
            if len(rows):
                out = out.index_copy(0, rows, torch.tanh(expert(x[rows])))
        return self.head(out)


class LateMixing(nn.Module):
    """Subtracts the batch's mean once it has run often enough."""

    def __init__(self, after):
        super().__init__()
        self.linear, self.after, self.calls = nn.Linear(WIDTH, 3), after, 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x - x.mean(0) if self.calls > self.after else x)


def true_gradients(model, batches, name):
    """Autograd's gradient of each row run alone."""
    weight = dict(model.named_parameters())[name]
    result = []
    for batch in batches:
        for row in range(len(batch[0])):
            loss = TokenLoss().losses(model, [part[row : row + 1] for part in batch]).sum()
            (gradient,) = torch.autograd.grad(loss, [weight], allow_unused=True)
            result.append(torch.zeros_like(weight) if gradient is None else gradient)
    return torch.stack(result)


def assert_right(store, model, batches):
    gradients = gk.gradients(store, split="train")
    stored = gradients.restore(gradients.ids)
    for name, _ in model.named_parameters():
        true = true_gradients(model, batches, name)
        result = torch.as_tensor(stored[name]).reshape(true.shape)
        assert torch.allclose(result, true, rtol=1e-4, atol=1e-5), name


def capture(store, model, batches, **options):
    values = {"task": TokenLoss(), "split": "train", "progress": False, **options}
    return gk.capture(store, model, batches, **values)


def sequences(*shapes, seed=0):
    """Batches of `[rows, length]` tokens and labels."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(1, WORDS, shape, generator=draw), torch.randn(shape[0], 3, generator=draw))
        for shape in shapes
    ]


def routed(*chosen, seed=0):
    """Batches whose rows go to the given experts."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(len(some), WIDTH, generator=draw),
            torch.tensor(some),
            torch.randn(len(some), 3, generator=draw),
        )
        for some in chosen
    ]


def of_lengths(*lengths, seed=0):
    """Batches of padded rows with these lengths."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(len(some), max(some), WIDTH, generator=draw),
            torch.tensor(some),
            torch.randn(len(some), 3, generator=draw),
        )
        for some in lengths
    ]


SORTED = {
    "other lengths": [[4] * 8, [2, 5, 1, 4, 3, 5, 2, 1], [3, 6, 2, 6, 1, 5, 4, 2]],
    "same shapes": [[5] * 8, *([2, 5, 1, 4, 3, 5, 2, 1], [1, 5, 2, 3, 1, 5, 4, 2]) * 4],
}


@pytest.mark.parametrize("lengths", SORTED.values(), ids=SORTED)
def test_rows_sorted_by_length_are_right(store, lengths):
    torch.manual_seed(0)
    model, batches = ByLength(), of_lengths(*lengths)
    capture(store, model, batches)
    assert_right(store, model, batches)


TIME_MAJOR = {
    "one long document first": [(1, 9), (8, 3)],
    "one step first": [(4, 1), (4, 5), (3, 2)],
    "one row last": [(6, 4), (1, 7)],
    "as many steps as rows": [(4, 6), (6, 6), (5, 2)],
}


@pytest.mark.parametrize("shapes", TIME_MAJOR.values(), ids=TIME_MAJOR)
def test_time_major_batches_of_any_shape_are_right(store, shapes):
    torch.manual_seed(0)
    model, batches = TimeMajor(), sequences(*shapes)
    capture(store, model, batches)
    assert_right(store, model, batches)


def test_experts_that_first_run_later_are_captured(store):
    torch.manual_seed(0)
    model, batches = Experts(), routed([0, 0, 0], [0, 1, 0, 1], [2, 2, 1])
    captured = capture(store, model, batches)
    assert {layer.name for layer in captured.layers} == {f"experts.{n}" for n in range(3)} | {
        "head"
    }
    assert_right(store, model, batches)


@pytest.mark.parametrize("keep", ["exact", "1KiB", "losses"])
def test_a_capacity_that_overflows_later_is_refused(store, keep):
    torch.manual_seed(0)
    model = Experts(capacity=2)
    batches = routed([0, 1, 2, 0, 1, 2], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1])
    with raises(CaptureError, "capture.samples_mix_later"):
        capture(store, model, batches, keep=keep)
    with pytest.raises(GradkeepError):
        gk.gradients(store, split="train")


@pytest.mark.parametrize("keep", ["exact", "1KiB", "losses"])
def test_a_model_that_changes_later_is_refused(store, keep):
    torch.manual_seed(0)
    model = LateMixing(after=30)
    draw = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(6, WIDTH, generator=draw), torch.randn(6, 3, generator=draw))
        for _ in range(60)
    ]
    with pytest.raises(CaptureError) as caught:
        capture(store, model, batches, keep=keep)
    assert caught.value.code in ("capture.samples_mix_later", "capture.model_changed")


def test_rows_dropped_only_in_the_last_batch_are_found(store):
    torch.manual_seed(0)
    model = Experts(capacity=4)
    batches = routed(*[[0, 1, 2, 0, 1, 2]] * 12, [0] * 64)
    with raises(CaptureError, "capture.samples_mix_later"):
        capture(store, model, batches)


OPTIONS = {
    "coordinates": {"keep": "1KiB"},
    "bytes": {"memory_budget": 1 << 22},
    "fraction": {"memory_budget": 0.8},
    "dense": {"keep": "dense"},
    "factors": {"keep": "factors"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["sorted", "time-major", "experts"])
def test_later_batches_are_right_or_refused_however_rows_are_kept(store, kind, options):
    torch.manual_seed(0)
    model, batches = {
        "sorted": lambda: (ByLength(), of_lengths(*SORTED["other lengths"])),
        "time-major": lambda: (TimeMajor(), sequences((1, 9), (8, 3), (8, 1))),
        "experts": lambda: (Experts(), routed([0, 0, 0], [0, 1, 0, 1], [2, 2, 1])),
    }[kind]()
    try:
        capture(store, model, batches, **options)
    except BudgetError:
        assert isinstance(options["memory_budget"], float)  # a model too small to drop anything of
        return
    if "keep" not in options or options["keep"] in ("dense", "factors"):
        assert_right(store, model, batches)
        return
    exact = gk.open(store.location + "-exact")
    capture(exact, model, batches)
    assert_right(exact, model, batches)
    norms = store.read(gk.gradients(store, split="train").key).column("norm")
    assert (norms > 0).all()


def test_a_capture_is_resumed_and_compared_with_its_adjustments(store):
    torch.manual_seed(0)
    model, batches = Experts(), routed([0, 0, 0], [0, 1, 0, 1], [2, 2, 1])
    capture(store, model, batches)
    assert capture(store, model, batches).reused_rows == 10
    with pytest.raises(CaptureError):
        capture(store, model, [(x * 2, e, y) for x, e, y in batches])


class Interrupt(Exception):
    pass


def test_an_interrupted_capture_goes_on_with_batches_unlike_the_first(store):
    torch.manual_seed(0)
    draws = [[0] * 8, [0] * 8, [1, 0] * 4, [2, 1] * 4]
    model, batches = Experts(), routed(*draws)

    class Broken(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            for number, batch in enumerate(list.__iter__(self)):
                if number == 2 and self.passes > 2:
                    raise Interrupt
                yield batch

    with pytest.raises(Interrupt):
        capture(store, model, Broken(batches))
    capture(store, model, batches)
    assert_right(store, model, batches)


def test_subclasses_with_a_forward_of_their_own_are_captured_as_they_compute(store):
    class Doubled(nn.Linear):  # a matrix product, found in the graph
        def forward(self, x):
            return 2 * super().forward(x)

    class Clipped(nn.Linear):  # none: its module runs again
        def forward(self, x):
            return torch.einsum("bi,oi->bo", x, self.weight.clamp(max=0.1)) + self.bias

    class Named(nn.Linear):
        pass

    torch.manual_seed(0)
    model = nn.Sequential(Doubled(WIDTH, 5), nn.Tanh(), Clipped(5, 5), nn.Tanh(), Named(5, 3))
    draw = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, WIDTH, generator=draw), torch.randn(4, 3, generator=draw))]
    captured = capture(store, model, batches)
    assert [layer.storage for layer in captured.layers] == ["factors", "dense", "factors"]
    assert_right(store, model, batches)


@pytest.mark.parametrize("text", ["[", "[1]", '{"late": 1}', "[" * 100_000], ids=range(4))
def test_adjustments_that_cannot_be_read_are_refused(text):
    from gradkeep.capturing._storage import Adjustments

    with raises(CaptureError, "capture.bad_adjustments"):
        Adjustments.from_text(text)
