"""Models that are compiled, checkpointed or offloaded: the gradients of the plain model."""

import copy
import types

import pytest
import torch
from raises import raises
from torch import nn
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import gradkeep as gk
from gradkeep.capturing._weights import put_weights
from gradkeep.errors import CaptureError

DATA = [
    (torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1]))
]


class Block(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.rand(6))
        self.reentrant = reentrant

    def body(self, x):
        return self.norm(self.linear(x).tanh()) * self.scale

    def forward(self, x):
        if self.reentrant is None:
            return x + self.body(x)
        return x + checkpoint(self.body, x, use_reentrant=self.reentrant)


def new_model(reentrant=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Block(reentrant), Block(reentrant), nn.Linear(6, 3))


def capture(store, model, **options):
    options = {"task": gk.Classification(), "split": "train", "progress": False} | options
    return gk.capture(store, model, DATA, **options)


def rows(store, **where):
    result = gk.gradients(store, split="train", **where)
    return result.restore(result.ids)


def assert_same(store, plain, other, **options):
    expected = capture(store, plain, name="plain", **options)
    result = capture(store, other, name="other", **options)
    assert [layer.storage for layer in result.layers] == [
        layer.storage for layer in expected.layers
    ]
    ours, theirs = rows(store, name="other"), rows(store, name="plain")
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"keep": "dense"}, {"memory_budget": "1MiB"}], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_captured_as_plain_ones(store, reentrant, options):
    hidden = checkpointing.CheckpointFunction
    assert_same(store, new_model(), new_model(reentrant), **options)
    assert checkpointing.CheckpointFunction is hidden


def test_checkpointed_sequences_are_captured_too(store):
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 3))

        def forward(self, x):
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=True)

    store_model = Sequence()
    plain = copy.deepcopy(store_model)
    plain.forward = plain.layers.forward
    assert_same(store, plain, store_model)


def test_16_bit_weights_may_be_checkpointed(store):
    with pytest.warns(gk.CaptureWarning, match="computed with as float32"):
        assert_same(store, new_model().bfloat16(), new_model(True).bfloat16())


def compiled(how):
    model = new_model()
    if how == "whole":
        return torch.compile(model, backend="eager")
    if how == "in place":
        model.compile(backend="eager")
    if how == "a function":
        model[1].forward = torch.compile(model[1].forward, backend="eager")
    return model


@pytest.mark.filterwarnings("ignore")  # those of the compiler
@pytest.mark.parametrize("how", ["whole", "in place", "a function"])
def test_compiled_models_are_captured_as_plain_ones(store, how):
    model = compiled(how)
    model(DATA[0][0])  # compiled code is there before the capture
    assert_same(store, new_model(), model)


@pytest.mark.filterwarnings("ignore")  # those of the compiler
def test_a_block_that_is_compiled_by_itself_keeps_its_factors(store):
    model = new_model()
    model[1] = torch.compile(model[1], backend="eager")
    model(DATA[0][0])
    expected = capture(store, new_model(), checkpoints="plain")
    result = capture(store, model, checkpoints="other")
    assert [one.storage for one in result.layers] == [one.storage for one in expected.layers]
    ours, theirs = rows(store, checkpoints="other"), rows(store, checkpoints="plain")
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name.replace("_orig_mod.", "")])


class Fetching:
    """What accelerate puts around a module: weights come for the forward pass, and go again."""

    def __init__(self, weights_map):
        self.offload, self.place_submodules, self.execution_device = True, False, "cpu"
        self.weights_map = weights_map


def offload(model, *, files):
    """Weights on the meta device, and hooks that know where they are: in memory, or in files."""
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}

    class Files(dict):
        def __getitem__(self, name):
            return super().__getitem__(name).clone()  # at another place each time, as files are

    for path, module in model.named_modules():
        own = {
            name: values[f"{path}.{name}" if path else name]
            for name, _ in module.named_parameters(recurse=False)
        }
        if not own:
            continue
        module._hf_hook = Fetching(Files(own) if files else own)
        module._old_forward = module.forward
        module.forward = types.MethodType(_never, module)
        for name in own:
            module._parameters[name] = nn.Parameter(torch.empty_like(own[name], device="meta"))
    return model


def _never(module, *args, **kwargs):
    raise AssertionError("the hooks' own forward makes other parameters each time")


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:weights in:gradkeep.CaptureWarning")
def test_offloaded_models_are_captured_as_plain_ones(store, kind, files):
    model = offload(new_model().to(kind), files=files)
    forwards = {path: module.forward for path, module in model.named_modules()}
    assert_same(store, new_model().to(kind), model)
    assert all(p.is_meta for p in model.parameters())
    assert all(module.forward == forwards[path] for path, module in model.named_modules())


def test_checkpoints_are_not_loaded_into_offloaded_models(store):
    model = offload(new_model(), files=False)
    with raises(CaptureError, "capture.offloaded_model"):
        put_weights(model, new_model().state_dict(), name="one")
    with raises(CaptureError, "capture.offloaded_model"):
        capture(store, model, checkpoints={"one": new_model().state_dict()})
