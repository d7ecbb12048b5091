"""The zoo builds what it says, the same every time, without downloads."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from raises import raises

from gradkeep.compat.dtr.zoo import build, default_sizes, published_sizes, zoo
from gradkeep.errors import RematError

QUICK = [
    *("resnet20", "unet", "lstm", "lstm_encoder", "gru_encoder", "treelstm"),
    *("transformer", "transformer_encoder", "unrolled_gan", "gru", "treelstm_old"),
]
# The counts that are known of the published models, at their published number of classes.
PUBLISHED = {
    "resnet20": (269_722, 10),
    "resnet110": (1_727_962, 10),
    "resnet1202": (19_421_274, 10),
    "densenet100": (769_162, 10),
    "resnet18": (11_689_512, 1000),
    "resnet50": (25_557_032, 1000),
    "resnet152": (60_192_808, 1000),
    "densenet121": (7_978_856, 1000),
    "densenet161": (28_681_000, 1000),
    # Without the head in its middle, of 3,326,696.
    "inceptionv3": (23_834_568, 1000),
    "inceptionv4": (42_681_353, 1001),
}


@pytest.mark.parametrize("name", QUICK)
def test_a_step_fills_every_gradient_and_starts_from_none(name):
    work = build(name, seed=3)
    torch.manual_seed(0)
    first = work.step()
    gradients = [parameter.grad for parameter in work.model.parameters()]
    assert torch.isfinite(first)
    assert not first.requires_grad
    assert sum(gradient is not None and bool(gradient.any()) for gradient in gradients) > 2
    copies = [None if gradient is None else gradient.clone() for gradient in gradients]
    torch.manual_seed(0)
    work.step()
    for parameter, before in zip(work.model.parameters(), copies, strict=True):
        if before is None:
            assert parameter.grad is None
        elif name in ("lstm_encoder", "gru_encoder", "transformer_encoder", "unrolled_gan"):
            # Sums may be taken in another order; twice the gradient would still be seen.
            torch.testing.assert_close(parameter.grad, before)
        else:
            assert torch.equal(parameter.grad, before)


@pytest.mark.parametrize("name", QUICK)
def test_the_same_seed_builds_the_same_and_another_seed_another(name):
    def loss(seed):
        work = build(name, seed=seed)
        torch.manual_seed(0)
        return work.loss().item()

    state = torch.get_rng_state()
    build(name, seed=5)
    assert torch.equal(torch.get_rng_state(), state), "building must not touch torch's own state"
    assert loss(1) == loss(1)
    assert loss(1) != loss(2)


def test_large_models_run_too():
    for name in ("resnet18", "densenet121"):
        assert build(name, height=32, width=32).step().isfinite()
    assert build("densenet100", batch_size=1, height=16, width=16).step().isfinite()
    assert build("inceptionv4", height=75, width=75).step().isfinite()
    assert build("inceptionv3", height=75, width=75).step().isfinite()


def test_an_unrolled_gru_is_torchs_cell():
    work = build("gru", batch_size=3, length=5, in_dim=4, mem_dim=6)
    cell = torch.nn.GRU(4, 6)
    plain = work.model
    with torch.no_grad():
        cell.weight_ih_l0.copy_(plain.from_input.weight)
        cell.weight_hh_l0.copy_(plain.from_state.weight)
        cell.bias_ih_l0.copy_(plain.from_input.bias)
        cell.bias_hh_l0.copy_(plain.from_state.bias)
    steps = torch.randn(5, 3, 4)
    torch.testing.assert_close(plain(list(steps)), cell(steps)[0][-1])


def test_the_older_tree_compares_two_sentences_of_words():
    work = build("treelstm_old", batch_size=2, words=5)
    names = {name.split(".")[0] for name, _ in work.model.named_parameters()}
    assert names == {"embedding", "tree", "product", "difference", "scores"}
    assert published_sizes("treelstm_old")["mem_dim"] == 150


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_models_have_as_many_parameters_as_the_published_ones(name):
    expected, classes = PUBLISHED[name]
    with torch.device("meta"):
        work = build(name, classes=classes)
    assert work.parameters == expected


def test_every_name_has_published_sizes_at_least_as_large():
    for name in zoo():
        small, large = default_sizes(name), published_sizes(name)
        assert small.keys() == large.keys()
        assert large["batch_size"] > small["batch_size"], name


def test_sizes_change_what_is_built():
    assert build("lstm", mem_dim=8).parameters == 4 * 8 * (16 + 1) + 4 * 8 * 8
    assert build("unet", height=33, width=47, batch_size=1).step().isfinite()
    deep, flat = build("treelstm", depth=5, irregular=0), build("treelstm", depth=1)
    assert deep.parameters == flat.parameters
    assert build("unet", batch_size=3).sizes["batch_size"] == 3


def test_listing_the_zoo_needs_no_torch():
    code = (
        "import sys, gradkeep.compat.dtr.zoo as d; d.zoo(); d.default_sizes('unet'); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_workload_is_frozen():
    work = build("lstm")
    with pytest.raises(dataclasses.FrozenInstanceError):
        work.name = "other"


@pytest.mark.parametrize(
    ("name", "sizes", "code", "words"),
    [
        ("resnet33", {}, "compat.unknown_model", "resnet32"),
        ("gruu", {}, "compat.unknown_model", "gru_encoder"),
        ("unet", {"length": 3}, "compat.unknown_size", "channels"),
        ("unet", {"batch_size": 0}, "compat.size_too_small", "at least 1"),
        ("unet", {"batch_size": "8"}, "argument.invalid", "batch_size must be"),
        ("unet", {"batch_size": True}, "argument.invalid", "batch_size must be"),
        ("unet", {"height": 1.5}, "compat.size_type", "an integer"),
        ("transformer", {"dim": 30}, "compat.dim_and_heads", "heads=4"),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_could(name, sizes, code, words):
    with raises(RematError, code) as caught:
        build(name, **sizes)
    assert words in str(caught.value)
