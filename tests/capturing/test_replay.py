"""Capturing: what is kept beside gradients, resuming, and clear errors for bad input."""

import copy
import warnings

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradkeep as gk
from gradkeep.errors import (
    BudgetError,
    CaptureError,
    MissingRowsError,
    QueryError,
    SchemaMismatchError,
)

KEY = gk.store.CaptureKey("final", "train")


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(20, 4, generator=generator), torch.randint(0, 3, (20,), generator=generator)
    )


def capture(store, model, data, **options):
    options = {"task": gk.Classification(), "split": "train", "progress": False} | options
    loader = data if isinstance(data, DataLoader | list) else DataLoader(data, batch_size=6)
    return gk.capture(store, model, loader, **options)


def test_losses_outputs_labels_predictions_norms_and_embeddings_are_kept(store, model, data):
    result = capture(store, model, data, embeddings=["0"])
    block = store.read(KEY)
    x, y = data.tensors
    with torch.no_grad():
        logits = model(x)
        losses = nn.functional.cross_entropy(logits, y, reduction="none")
        p = logits.softmax(1).gather(1, y[:, None])[:, 0]
    assert np.allclose(block.column("loss"), losses, atol=1e-6)
    assert np.allclose(block.column("output"), torch.logit(p), atol=1e-4)
    assert np.allclose(block.column("slope"), p - 1, atol=1e-6)
    assert (block.column("label") == y.numpy()).all()
    assert (block.column("predicted") == logits.argmax(1).numpy()).all()
    assert np.allclose(block.column("embedding.0"), model[0](x).detach(), atol=1e-6)
    assert block.column("norms").shape == (20, 2)
    assert result.rows == 20
    assert "rows of 2 layers" in str(result)


def test_the_model_is_left_as_it_was(store, model, data):
    model.append(nn.Dropout(0.5))
    model.train()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    state = copy.deepcopy(model.state_dict())
    capture(store, model, data, mode="eval")
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert (model[0].weight.grad == 1).all()
    assert model[2].weight.grad is None
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_hooks_are_gone_after_an_error(store, model, data):
    class Broken(gk.Classification):
        def measure(self, model, batch):
            super().measure(model, batch)
            raise KeyError("broken")

    with pytest.raises(KeyError):
        capture(store, model, data, task=Broken())
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_do_not_change_results(store, model, data):
    """What the model answers while it is watched is what it answers alone, to the bit."""
    watched = []

    class Listening(gk.Classification):
        def measure(self, model, batch):
            # Else a few rows are run apart, to see whether they come out the same.
            if any(module._forward_hooks for module in model.modules()):
                watched.append((batch[0].clone(), model(batch[0]).detach()))
            return super().measure(model, batch)

    capture(store, model, data, task=Listening())
    assert sum(len(answers) for _, answers in watched) >= len(data)
    for inputs, answers in watched:
        assert torch.equal(model(inputs), answers)


def test_a_second_run_has_nothing_to_do(store, model, data):
    capture(store, model, data)
    second = capture(store, model, data)
    assert second.reused_rows == 20


def test_a_failed_run_is_resumed_and_ends_with_the_same_bytes(tmp_path, model, data):
    class Breaks(gk.Classification):
        left = 6

        def measure(self, model, batch):
            Breaks.left -= 1
            if Breaks.left < 0:
                raise OSError("the cable was pulled")
            return super().measure(model, batch)

        def describe(self):
            return gk.Classification().describe()

    whole, broken = gk.open(tmp_path / "whole"), gk.open(tmp_path / "broken")
    small = {"memory_budget": 8000}  # so that there are several segments
    assert capture(whole, model, data, **small).bytes
    failures = 0
    while failures < 10:
        try:
            capture(broken, model, data, task=Breaks(), **small)
            break
        except OSError:
            failures += 1
            with pytest.raises(QueryError, match="not finished"):
                gk.gradients(broken, split="train")
            Breaks.left = 7 + 2 * failures  # some kept rows are made again first
    assert 2 <= failures < 10
    files = sorted(p.name for p in (tmp_path / "whole" / KEY.folder / "seg").iterdir())
    assert len(files) > 1
    for name in files:
        one, other = ((tmp_path / w / KEY.folder / "seg" / name) for w in ("whole", "broken"))
        assert one.read_bytes() == other.read_bytes()


def test_changed_weights_are_refused(store, model, data):
    capture(store, model, data)
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(SchemaMismatchError, match="weights"):
        capture(store, model, data)


def test_changed_data_is_refused(store, model, data):
    capture(store, model, data)
    x, y = data.tensors
    with raises(CaptureError, "capture.rows_changed", mentions="sample 0 "):
        capture(store, model, TensorDataset(x.flip(0), y.flip(0)))
    with pytest.raises((SchemaMismatchError, CaptureError)):
        capture(store, model, TensorDataset(x[:10], y[:10]))


def test_another_task_is_refused(store, model, data):
    class Squared(gk.Task):
        def losses(self, model, batch):
            return model(batch[0]).square().sum(1)

    capture(store, model, data)
    with pytest.raises(SchemaMismatchError):
        capture(store, model, data, task=Squared())


def test_a_loader_that_gives_fewer_rows_is_not_called_finished(store, model, data):
    class Short(DataLoader):
        def __iter__(self):
            yield from list(super().__iter__())[:-1]

    with pytest.raises(MissingRowsError):
        capture(store, model, Short(data, batch_size=6))
    with pytest.raises(QueryError, match="not finished"):
        gk.gradients(store, split="train")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"shuffle": True}, "capture.shuffled_loader"),
        ({"drop_last": True}, "capture.drops_samples"),
    ],
)
def test_loaders_that_change_are_refused(store, model, data, options, code):
    with raises(CaptureError, code):
        capture(store, model, DataLoader(data, batch_size=6, **options))


def test_ids_may_be_in_the_batch(store, model, data):
    x, y = data.tensors
    numbers = torch.arange(20) * 3 + 1
    shuffled = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(x[shuffled], y[shuffled], numbers[shuffled])
    capture(store, model, rows, ids=2)
    result = gk.gradients(store, split="train")
    assert (result.ids == numbers[shuffled].numpy()).all()
    other = gk.open(store.location + "-plain")
    capture(other, model, data)
    plain = gk.gradients(other, split="train")
    assert torch.allclose(
        result.restore(numbers)["0.weight"], plain.restore(range(20))["0.weight"], atol=1e-6
    )


@pytest.mark.parametrize("ids", [[0, 0, *range(18)], [*range(19)]])
def test_duplicate_or_missing_ids_are_refused(store, model, data, ids):
    with pytest.raises((CaptureError, ValueError), match="id"):
        capture(store, model, data, ids=ids)


def test_a_mean_loss_is_refused(store, model, data):
    class Mean(gk.Task):
        def losses(self, model, batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with raises(CaptureError, "capture.not_per_sample"):
        capture(store, model, data, task=Mean())


def test_a_detached_loss_is_refused(store, model, data):
    class Detached(gk.Task):
        def losses(self, model, batch):
            return model(batch[0]).sum(1).detach()

    with raises(CaptureError, "capture.no_graph"):
        capture(store, model, data, task=Detached())


def test_train_mode_batch_norm_is_refused_and_dropout_needs_a_choice(store, data):
    norm = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).train()
    for mode in (None, "train"):
        with raises(CaptureError, "capture.batch_statistics"):
            capture(store, norm, data, mode=mode)
    drop = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)).train()
    with raises(CaptureError, "capture.random_model"):
        capture(store, drop, data, mode=None)
    assert capture(store, drop, data, mode="train").rows == 20


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_kept_in_single_and_it_is_said(store, model, data, kind):
    with pytest.warns(gk.CaptureWarning, match="computed with as float32"):
        capture(store, model.to(kind), data)
    assert gk.gradients(store, split="train").restore([0])["0.weight"].dtype == torch.float32
    assert model[0].weight.dtype == kind


def test_double_precision_models_are_kept_in_double(store, model, data):
    x, y = data.tensors
    capture(store, model.double(), TensorDataset(x.double(), y))
    assert gk.gradients(store, split="train").restore([0])["0.weight"].dtype == torch.float64


def test_unknown_layers_offer_the_nearest(store, model, data):
    named = nn.Sequential()
    named.add_module("hidden", nn.Linear(4, 6))
    named.add_module("output", nn.Linear(6, 3))
    with raises(CaptureError, "capture.unknown_layer", fix="hidden"):
        capture(store, named, data, layers="hiden*")
    result = capture(store, named, data, layers=["*", "!output"])
    assert [layer.name for layer in result.layers] == ["hidden"]


def test_not_a_number_is_told_with_the_sample(store, model, data):
    x, y = data.tensors
    x = x.clone()
    x[7, 2] = torch.nan
    with raises(CaptureError, "capture.not_finite", mentions="sample 7 "):
        capture(store, model, TensorDataset(x, y))


def test_all_zero_gradients_are_not_sealed(store, data):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    with torch.no_grad():
        model[0].bias.fill_(-1000)

    class Sum(gk.Task):
        def losses(self, model, batch):
            return model(batch[0]).sum(1)

    with raises(CaptureError, "capture.zero_gradients"):
        capture(store, model, data, task=Sum())
    with pytest.raises(QueryError, match="not finished"):
        gk.gradients(store, split="train")


def test_some_zero_gradients_are_noted(store, data):
    model = nn.Sequential(nn.Linear(4, 1), nn.ReLU())

    class Sum(gk.Task):
        def losses(self, model, batch):
            return model(batch[0]).sum(1)

    with pytest.warns(gk.CaptureWarning, match="exactly zero"):
        result = capture(store, model, data, task=Sum())
    assert "exactly zero" in result.notes[0]


def test_checkpoints_that_do_not_fit_are_refused(store, model, data, tmp_path):
    state = {name.replace("0.", "first."): v for name, v in model.state_dict().items()}
    before = copy.deepcopy(model.state_dict())
    with raises(CaptureError, "capture.weights_do_not_fit"):
        capture(store, model, data, checkpoints={"epoch-1": state})
    with raises(CaptureError, "capture.no_checkpoint"):
        capture(store, model, data, checkpoints={"epoch-1": tmp_path / "none.pt"})
    (tmp_path / "bad.pt").write_bytes(b"not a checkpoint")
    with raises(CaptureError, "capture.unreadable_checkpoint"):
        capture(store, model, data, checkpoints={"epoch-1": tmp_path / "bad.pt"})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_checkpoints_come_from_files_folders_and_wrappers(store, model, data, tmp_path):
    from safetensors.torch import save_file

    state = model.state_dict()
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "a.pt")
    (tmp_path / "hub").mkdir()
    save_file(state, tmp_path / "hub" / "model.safetensors")
    sources = {
        "a": tmp_path / "a.pt",
        "b": tmp_path / "hub",
        "c": gk.Weights(state, step=3, lr=0.1),
    }
    result = capture(store, model, data, checkpoints=sources)
    assert [one.key.checkpoint for one in result] == ["a", "b", "c"]
    assert {c.name: c.lr for c in store.checkpoints()} == {"a": None, "b": None, "c": 0.1}
    assert len({gk.gradients(store, split="train", checkpoints=n).weights for n in "abc"}) == 1


def test_uncovered_parameters_are_dense_an_error_or_skipped(store, data):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(x * self.scale)

    model = Scaled()
    with raises(CaptureError, "capture.uncovered", mentions="model (Scaled)"):
        capture(store, model, data, uncovered="error")
    with pytest.warns(gk.CaptureWarning, match="skipped, as no rule covers them: model"):
        result = capture(store, model, data, uncovered="skip", name="skipped")
    assert [layer.name for layer in result.layers] == ["head"]
    result = capture(store, model, data)
    assert {layer.name: layer.storage for layer in result.layers} == {
        "model": "dense",
        "head": "factors",
    }


def test_a_spare_parameter_of_the_whole_model_is_no_layer_that_wakes_up(store):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.scale = torch.nn.Linear(4, 3), torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.part(x)

    data = [(torch.randn(3, 4), torch.arange(3)) for _ in range(2)]
    with pytest.warns(gk.CaptureWarning, match="does not use these layers"):
        report = gk.capture(
            store, Scaled(), data, task=gk.Classification(), split="train", progress=False
        )
    assert [layer.name for layer in report.layers] == ["part"]
    assert report.rows == 6


def test_unused_layers_are_noted(store, data):
    model = nn.Sequential(nn.Linear(4, 3))
    model.spare = nn.Linear(2, 2)
    model.forward = lambda x: model[0](x)
    with pytest.warns(gk.CaptureWarning, match="does not use these layers"):
        result = capture(store, model, data)
    assert [layer.name for layer in result.layers] == ["0"]


def test_samples_that_influence_each_other_are_refused(store, data):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            y = self.head(x)
            return y - y.mean(0)

    with raises(CaptureError, "capture.gradients_do_not_add_up"):
        capture(store, Centred(), data)

    class CentredGradients(Centred):
        def forward(self, x):
            y = self.head(x)
            return y - y.mean(0) + y.mean(0).detach()  # the losses are of single samples

    with raises(CaptureError, "capture.gradients_do_not_add_up"):
        capture(store, CentredGradients(), data)


def test_a_budget_below_one_sample_names_the_least(store, model, data):
    with pytest.raises(BudgetError, match="at least") as caught:
        capture(store, model, data, memory_budget=100)
    least = int(caught.value.fix.split("memory_budget=")[1].split()[0])
    assert capture(store, model, data, memory_budget=least).rows == 20


def test_out_of_memory_halves_the_batch_and_goes_on(store, model, data):
    class Heavy(gk.Classification):
        def measure(self, model, batch):
            if len(batch[0]) > 2:
                raise torch.OutOfMemoryError("out of memory")
            return super().measure(model, batch)

    small = [tuple(t[:2] for t in data.tensors), tuple(t[2:] for t in data.tensors)]
    with pytest.warns(gk.CaptureWarning, match="continuing with"):
        result = capture(store, model, small, task=Heavy())
    assert result.rows == 20
    plain = gk.open(store.location + "-plain")
    capture(plain, model, data)
    a, b = (gk.gradients(s, split="train").restore(range(20)) for s in (store, plain))
    assert torch.allclose(a["2.weight"], b["2.weight"], atol=1e-6)


def test_queries_and_train_from_different_weights_or_layers_are_refused(store, model, data):
    capture(store, model, data, layers="0")
    capture(store, model, data, split="test")
    train, test = gk.gradients(store, split="train"), gk.gradients(store, split="test")
    with pytest.raises(QueryError, match="different layers"):
        gk.query.dot(test, train)
    with torch.no_grad():
        model[0].weight += 1
    capture(store, model, data, split="late", checkpoints="later")
    late = gk.gradients(store, split="late", layers="0")
    with pytest.raises(QueryError, match="different weights"):
        gk.query.dot(late, train)


def test_a_query_that_is_not_there_is_told(store, model, data):
    capture(store, model, data)
    train = gk.gradients(store, split="train")
    with pytest.raises(QueryError, match="no row with id 99"):
        gk.query.dot(train, train, ids=[99])
    with pytest.raises(QueryError, match="no capture of 'test'"):
        gk.gradients(store, split="test")
    with pytest.raises(gk.GradkeepError, match="no layer matches"):
        gk.gradients(store, split="train", layers="conv*")
    with pytest.raises(QueryError, match="Did you mean"):
        gk.query.dot(train, train, compute="factord")


def test_a_query_budget_below_the_least_names_it(store, model, data):
    capture(store, model, data)
    train = gk.gradients(store, split="train")
    with pytest.raises(BudgetError, match="at least"):
        gk.query.dot(train, train, memory_budget=1000)


def test_dict_batches_of_hugging_face_style_models_work(store):
    class Answer:
        def __init__(self, logits):
            self.logits = logits

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, input_ids, attention_mask):
            mask = attention_mask.unsqueeze(2)
            return Answer(self.head((self.embed(input_ids) * mask).sum(1)))

    model = Classifier()
    batch = {
        "input_ids": torch.randint(0, 9, (5, 6)),
        "attention_mask": (torch.rand(5, 6) > 0.3).long(),
        "labels": torch.randint(0, 2, (5,)),
    }
    assert capture(store, model, [batch]).rows == 5


def test_nothing_is_printed_or_warned_by_a_clean_capture(store, model, data, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(store, model, data)
    assert capsys.readouterr() == ("", "")
