"""A recording is compared with what `backward()` computed: rows that cannot be right are refused."""

import pytest
import torch
from raises import raises
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep.errors import CaptureError


def record(folder, model, step, steps=1, rows=6, **options):
    """Run `step(start, stop)` for consecutive ids inside of a recording."""
    with gk.recording(folder, model, checkpoints="now", **options) as rec:
        for start in range(0, steps * rows, rows):
            with rec.batch(range(start, start + rows)):
                step(start, start + rows)
    return gk.gradients(folder, split="train")


class HandTied(nn.Module):
    """The head reads the embedding's table without being a module."""

    def __init__(self):
        super().__init__()
        self.emb, self.mid = nn.Embedding(11, 5), nn.Linear(5, 5)

    def forward(self, tokens):
        return F.linear(torch.tanh(self.mid(self.emb(tokens))), self.emb.weight)


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * 3.0


class ShiftedLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x.square())


class NormalisedLinear(nn.Linear):
    """Its own forward, and a class that a rule knows."""

    def forward(self, x):
        return F.linear(x, F.normalize(self.weight, dim=1), self.bias)


def tokens(rows, steps=4):
    return torch.randint(0, 11, (rows, steps), generator=torch.Generator().manual_seed(3))


def test_a_head_tied_by_hand_is_refused_by_name(tmp_path):
    torch.manual_seed(0)
    model, x = HandTied(), tokens(6)
    with raises(CaptureError, "capture.sums_differ", mentions="layer emb"):
        record(
            tmp_path,
            model,
            lambda a, b: F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward(),
        )


@pytest.mark.parametrize("layer", [ShiftedLinear(5, 3), NormalisedLinear(5, 3)])
def test_linear_layers_with_a_forward_of_their_own_are_refused_by_name(tmp_path, layer):
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), layer), torch.randn(6, 4)
    with raises(CaptureError, "capture.not_recordable", mentions="2 ("):
        record(tmp_path, model, lambda a, b: model(x).square().sum(1).mean().backward())


def test_a_scaled_embedding_is_refused_by_name(tmp_path):
    model = nn.Sequential(ScaledEmbedding(11, 5), nn.Linear(5, 3))
    with raises(CaptureError, "capture.not_recordable", mentions="0 ("):
        record(tmp_path, model, lambda a, b: model(tokens(6)).square().mean().backward())


def test_hooks_that_change_gradients_are_refused(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(6, 4)

    def step(start, stop):
        hidden = model[0](x)
        hidden.register_hook(lambda gradient: gradient * 2)
        model[2](torch.tanh(hidden)).square().sum(1).mean().backward()

    with raises(CaptureError, "capture.sums_differ", mentions="layer 0:"):
        record(tmp_path, model, step)
    model[2].weight.register_hook(torch.zeros_like)
    with raises(CaptureError, "capture.sums_differ", mentions="layer 2:"):
        record(tmp_path / "b", model, lambda a, b: model(x).square().sum(1).mean().backward())


def test_a_mismatch_in_a_later_step_is_found(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(240, 4)

    def step(start, stop):
        out = model(x[start:stop]).square().sum(1).mean()
        if start >= 60:  # a second use of the weight, from the eleventh step on
            out = out + F.linear(x[start:stop], model[0].weight).square().mean()
        out.backward()

    with raises(CaptureError, "capture.sums_differ", mentions="layer 0:"):
        record(tmp_path, model, step, steps=40)


def test_gradients_that_were_there_before_are_not_counted(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(start, stop):  # accumulation, clipping, an optimizer step, two backward passes
        losses = model(x[start:stop]).square().sum(1)
        (losses.mean() / 2).backward(retain_graph=True)
        (losses.mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    assert len(record(tmp_path, model, step, steps=2)) == 12


class SortsRows(nn.Module):
    """Sorts by length, runs the layers, restores the order: other rows than ids say."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x, lengths):
        order = lengths.argsort(descending=True, stable=True)
        hidden = torch.tanh(self.inner(x[order]))
        steps = torch.arange(x.shape[1])[None] < lengths[order][:, None]
        out = self.outer((hidden * steps[..., None]).sum(1))
        return out[order.argsort()]


def test_rows_in_another_order_inside_of_the_model_are_refused(tmp_path):
    torch.manual_seed(0)
    model, x = SortsRows(), torch.randn(6, 4, 3)

    def step(start, stop):
        lengths = torch.full((6,), 4) if start == 0 else torch.tensor([1, 2, 4, 3, 2, 1])
        model(x, lengths).square().sum(1).mean().backward()

    with raises(CaptureError, "capture.rows_of_others"):
        record(tmp_path, model, step, steps=3)


class RealTokens(nn.Module):
    """Leaves padding out before its layer, so that samples have different numbers of rows."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x, lengths):
        real = torch.arange(x.shape[1])[None] < lengths[:, None]
        out = x.new_zeros(*x.shape[:2], 2)
        out[real] = torch.tanh(self.inner(x[real]))
        return out


def test_rows_of_real_tokens_only_are_refused(tmp_path):
    torch.manual_seed(0)
    model, x, lengths = RealTokens(), torch.randn(6, 4, 3), torch.tensor([1, 3, 2, 2, 3, 1])
    with raises(CaptureError, "capture.rows_of_others"):
        record(
            tmp_path, model, lambda a, b: model(x, lengths).square().sum((1, 2)).mean().backward()
        )


class TwoViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, one, two):
        both = self.outer(torch.tanh(self.inner(torch.cat([one, two]))))
        return both[: len(one)], both[len(one) :]


def test_two_views_joined_inside_of_the_model_are_refused(tmp_path):
    torch.manual_seed(0)
    model, x = TwoViews(), torch.randn(2, 6, 3)

    def step(start, stop):
        a, b = model(x[0], x[1])
        (a - b).square().sum(1).mean().backward()

    with raises(CaptureError, "capture.rows_of_others"):
        record(tmp_path, model, step)


class Mixes(nn.Module):
    """Samples attend to each other."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x):
        hidden = self.inner(x)
        return self.outer(hidden - hidden.mean(0))


def test_models_that_mix_samples_are_refused(tmp_path):
    torch.manual_seed(0)
    model, x = Mixes(), torch.randn(6, 3)
    with raises(CaptureError, "capture.rows_of_others"):
        record(tmp_path, model, lambda a, b: model(x).square().sum(1).mean().backward())


def contrastive(out):
    logits = F.normalize(out, dim=1) @ F.normalize(out, dim=1).roll(1, 0).T
    return F.cross_entropy(logits, torch.arange(len(out)))


def spread(out):
    return out.std(0).sum()


def squared_mean(out):
    return out.square().sum(1).mean() + out.mean(0).square().sum()


@pytest.mark.parametrize("loss", [contrastive, spread, squared_mean])
def test_losses_that_mix_samples_are_refused(tmp_path, loss):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(6, 4)
    with raises(CaptureError, "capture.loss_mixes_samples"):
        record(tmp_path, model, lambda a, b: loss(model(x)).backward())


def test_a_loss_that_cannot_be_differentiated_twice_is_told_once(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 5), torch.randn(6, 7, 4)

    def step(start, stop):
        logs = model(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((6,), 7)
        F.ctc_loss(
            logs, torch.ones(6, 2, dtype=torch.long), lengths, torch.full((6,), 2)
        ).backward()

    with pytest.warns(gk.CaptureWarning, match="cannot be checked") as warned:
        record(tmp_path, model, step, steps=3)
    assert len(warned) == 1


def test_a_checked_step_leaves_the_loop_as_it_is(tmp_path):
    """Random numbers, buffers and gradients are those of a loop without a recording."""

    class Counts(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            x.sub_(0.5)
            return super().forward(x) + 0 * torch.rand(())

    results = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model, x = Counts(), torch.randn(18, 4)

        def step(start, stop, model=model, x=x):
            noise = torch.randn(6, 4)
            model(x[start:stop] + noise).square().sum(1).mean().backward()

        if recorded:
            record(tmp_path, model, step, steps=3)
        else:
            for start in (0, 6, 12):
                step(start, start + 6)
        results.append(
            [*model.parameters(), *[p.grad for p in model.parameters()], model.calls, torch.rand(3)]
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_steps_under_autocast_are_recorded(tmp_path):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
        torch.randn(6, 2, 6),
    )

    def step(start, stop):
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        out.float().square().sum(1).mean().backward()

    assert len(record(tmp_path, model, step, steps=2)) == 12
