"""Recording a loop that already runs: the gradients are those of each step's weights."""

import copy

import pytest
import torch
from autograd_reference import per_sample_gradients
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.errors import CaptureError


@pytest.fixture
def store(tmp_path):
    return gk.open(tmp_path)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 2, 6, generator=generator), torch.randint(0, 4, (n,), generator=generator))
        for n in (5, 5, 3)
    ]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_row_is_the_gradient_at_the_weights_of_its_step(store, reduction):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth = []
    plain = copy.deepcopy(model)
    with gk.recording(store, model, checkpoints="epoch-1", reduction=reduction) as rec:
        at = 0
        for x, y in batches():

            def losses(m, b):
                return nn.functional.cross_entropy(m(b[0]), b[1], reduction="none")

            truth.append(per_sample_gradients(copy.deepcopy(model), losses, (x, y)))
            ids = torch.arange(at, at + len(x))
            with rec.batch(ids, keep={"label": y}):
                loss = nn.functional.cross_entropy(model(x), y, reduction=reduction)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            at += len(x)
    result = gk.gradients(store, split="train")
    assert len(result) == 13
    restored = result.restore(range(13))
    for name, value in restored.items():
        want = torch.cat([part[name] for part in truth])
        assert torch.allclose(value, want, atol=1e-5), name
    assert (result.column("label") == torch.cat([y for _, y in batches()]).numpy()).all()
    # The loop learned what it would have learned without us.
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y, reduction=reduction).backward()
        optimizer.step()
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )
    assert not any(module._forward_hooks for module in model.modules())


def test_another_divisor_is_multiplied_back(store):
    model = make()
    x, y = batches()[0]
    with gk.recording(store, model, checkpoints="one") as rec, rec.batch(range(5), divisor=7.0):
        (nn.functional.cross_entropy(model(x), y, reduction="sum") / 7).backward()
    with gk.recording(store, model, checkpoints="two", reduction="sum") as rec, rec.batch(range(5)):
        nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    one, two = (
        gk.gradients(store, split="train", checkpoints=c).restore(range(5)) for c in ("one", "two")
    )
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)


def step(model, store, checkpoint, *, ids=range(5), backward=True, fails=False):
    x, y = batches()[0]
    with gk.recording(store, model, checkpoints=checkpoint) as rec:
        with rec.batch(ids):
            loss = nn.functional.cross_entropy(model(x), y)
            if backward:
                loss.backward()
        if fails:
            raise KeyError("broken")


def enter(model, store, checkpoint):
    with gk.recording(store, model, checkpoints=checkpoint):
        pass


def test_mistakes_are_told(store):
    model = make()
    with raises(CaptureError, "capture.no_backward"):
        step(model, store, "a", backward=False)
    with raises(CaptureError, "capture.rows_per_sample"):
        step(model, store, "b", ids=range(4))
    step(model, store, "c")
    with raises(CaptureError, "capture.exists"):
        enter(model, store, "c")
    norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train()
    with raises(CaptureError, "capture.batch_statistics"):
        enter(norm, store, "d")
    with raises(CaptureError, "capture.not_recordable"):
        enter(nn.LSTM(2, 2), store, "e")


def test_an_error_in_the_loop_leaves_nothing_that_looks_finished(store):
    with pytest.raises(KeyError):
        step(make(), store, "a", fails=True)
    with pytest.raises(gk.GradkeepError):
        gk.gradients(store, split="train")


def test_gradients_of_gradients_are_refused(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(6, 4)

    def step():
        inputs = x.clone().requires_grad_()
        loss = model(inputs).square().sum()
        (slopes,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + slopes.square().sum()).backward()

    with (
        raises(CaptureError, "capture.double_backward"),
        gk.recording(tmp_path, model, checkpoints="now", reduction="sum") as rec,
        rec.batch(range(6)),
    ):
        step()


def test_two_rows_for_one_id_are_told_once(tmp_path):
    model, x = nn.Linear(4, 2), torch.randn(6, 4)

    def recorded():
        with gk.recording(tmp_path, model, checkpoints="now", reduction="sum") as rec:
            for start in (0, 3):
                with rec.batch(range(start, start + 3)):
                    model(torch.cat([x[start : start + 3]] * 2)).square().sum().backward()

    with pytest.warns(gk.CaptureWarning, match="need an id each") as warned:
        recorded()
    assert len(warned) == 1


class Steps(nn.Module):
    """Time comes first, as it does for torch's recurrent layers."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


def recorded_steps(folder, model, batches, **options):
    store, at = gk.open(folder), 0
    with gk.recording(store, model, checkpoints="now", reduction="sum", **options) as rec:
        for x in batches:
            with rec.batch(range(at, at + x.shape[1])):
                model(x).square().sum().backward()
            at += x.shape[1]
    result = gk.gradients(store, split="train").restore(range(at))
    samples = [x[:, at] for x in batches for at in range(x.shape[1])]
    expected = [
        torch.autograd.grad(model(sample).square().sum(), model.inner.weight)[0]
        for sample in samples
    ]
    return torch.allclose(result["inner.weight"], torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_steps_before_samples_are_seen_by_their_sizes(tmp_path):
    torch.manual_seed(0)
    model = Steps()
    assert recorded_steps(tmp_path / "a", model, [torch.randn(5, 4, 3), torch.randn(2, 3, 3)])
    # A batch with as many steps as samples is read as the one before.
    assert recorded_steps(tmp_path / "b", model, [torch.randn(5, 4, 3), torch.randn(4, 4, 3)])


def test_as_many_steps_as_samples_are_told_or_said(tmp_path):
    torch.manual_seed(0)
    model, square = Steps(), [torch.randn(4, 4, 3)]
    assert recorded_steps(tmp_path / "a", model, square, batch_first=False)
    assert not recorded_steps(tmp_path / "b", model, square, batch_first=True)
    with pytest.warns(gk.CaptureWarning, match="batch_first=False"):
        recorded_steps(tmp_path / "c", model, square)
    with pytest.raises(CaptureError, match="batch_first"):
        recorded_steps(tmp_path / "d", model, square, batch_first="yes")
