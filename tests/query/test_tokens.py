"""Products token by token: each by autograd through the layer's own call, and sums by whole rows."""

import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.data import GPT
from gradkeep.errors import QueryError

VOCABULARY, LENGTH = 11, 7


@pytest.fixture
def store(tmp_path):
    return gk.open(tmp_path / "store")


def data(rows, *, prompt=False):
    tokens = torch.randint(VOCABULARY, (rows, LENGTH))
    labels = tokens.clone()
    for row in range(rows):
        if prompt:
            labels[row, : row % 3] = -100  # nothing is asked of a prompt, but it is read
        labels[row, LENGTH - row % 3 :] = -100
    return {"input_ids": tokens, "labels": labels}


def world(store, *, tied=True, prompt=False, keep="factors", **options):
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, length=LENGTH, dim=8, heads=2, layers=2, tied=tied).eval()
    splits = {"train": data(6, prompt=prompt), "test": data(3, prompt=prompt)}
    for split, batch in splits.items():
        gk.capture(
            store,
            model,
            [batch],
            task=gk.LanguageModeling(),
            split=split,
            keep=keep,
            progress=False,
            **options,
        )
    return model, splits


def whole_gradients(model, batch):
    """Of every row by parameter, in float64."""
    model, actual = model.double(), []
    for row in range(len(batch["labels"])):
        model.zero_grad()
        one = {name: value[row : row + 1] for name, value in batch.items()}
        gk.LanguageModeling().losses(model, one).sum().backward()
        actual.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return actual


def by_hand(model, batch, row, direction):
    """`[T]`: what each call's position adds, all linear layers together, by hooks in float64."""
    model, total = model.double(), torch.zeros(LENGTH, dtype=torch.float64)
    stored, handles = [], []

    def keep(module, args, output):
        output.retain_grad()
        stored.append((module, args[0].detach(), output))

    handles += [
        module.register_forward_hook(keep)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    one = {name: value[row : row + 1] for name, value in batch.items()}
    gk.LanguageModeling().losses(model, one).sum().backward()
    for handle in handles:
        handle.remove()
    names = {id(p): name for name, p in model.named_parameters()}
    for module, x, output in stored:
        moved = x[0] @ direction[names[id(module.weight)]].T
        if module.bias is not None:
            moved = moved + direction[names[id(module.bias)]]
        total += (moved * output.grad[0]).sum(1)
    return total


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prompt", [True, False])
def test_tokens_are_those_of_autograd_and_add_up_to_the_product(store, tied, prompt):
    model, splits = world(store, tied=tied, prompt=prompt)
    train, test = gk.gradients(store, split="train"), gk.gradients(store, split="test")
    actual = gk.query.tokens(test, train)
    expected = gk.query.dot(test, train).values
    scale = expected.abs().max()
    assert (actual.sums - expected).abs().max() <= 1e-5 * scale
    query_gradients = whole_gradients(model, splits["test"])
    for query, direction in enumerate(query_gradients):
        for row in range(6):
            tokens = by_hand(model, splits["train"], row, direction)
            length = int(actual.lengths[row])
            assert (actual.values[query, row, :length] - tokens[:length]).abs().max() < 1e-5 * scale
            assert not tokens[length:].any()
            assert not actual.values[query, row, length:].any()
    assert {"wpe", "ln_f"} <= set(actual.rest_layers)
    assert actual.values.isfinite().all()


def test_rows_and_queries_are_chosen_by_id(store):
    world(store)
    train, test = gk.gradients(store, split="train"), gk.gradients(store, split="test")
    whole = gk.query.tokens(test, train)
    some = gk.query.tokens(test, train, ids=[2, 0], train_ids=[4, 1], memory_budget="1MiB")
    assert some.query_ids.tolist() == [2, 0]
    assert some.train_ids.tolist() == [4, 1]
    longest = some.values.shape[2]
    torch.testing.assert_close(some.values, whole.values[[2, 0]][:, [4, 1], :longest])
    torch.testing.assert_close(some.rest, whole.rest[[2, 0]][:, [4, 1]])


def test_given_directions_are_queries_too(store):
    world(store)
    train, test = gk.gradients(store, split="train"), gk.gradients(store, split="test")
    mean = gk.query.mean(test)
    actual = gk.query.along_tokens(train, mean, ids=[3])
    torch.testing.assert_close(actual.sums[0], gk.query.along(train, mean)[0, 3:4])


def test_dense_layers_are_in_the_rest(store):
    world(store, keep={"*": "factors", "h.0*": "dense"})
    train, test = gk.gradients(store, split="train"), gk.gradients(store, split="test")
    actual = gk.query.tokens(test, train)
    assert "h.0.mlp.fc" in actual.rest_layers
    assert "h.0.mlp.fc" not in actual.layers
    expected = gk.query.dot(test, train).values
    assert (actual.sums - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_what_is_not_kept_by_token_is_refused(store):
    world(store, keep="dense")
    train = gk.gradients(store, split="train")
    with raises(QueryError, "query.no_tokens"):
        gk.query.tokens(train, train)
    world(store, keep="600B", name="small")
    train = gk.gradients(store, split="train", name="small")
    with raises(QueryError, "query.coordinates_only"):
        gk.query.tokens(train, train)
    world(store, name="factors")
    train = gk.gradients(store, split="train", name="factors")
    with raises(QueryError, "query.no_training_rows"):
        gk.query.tokens(train, train, train_ids=[])
    with raises(QueryError, "query.no_queries"):
        gk.query.tokens(train, train, ids=[])
    with raises(QueryError, "query.too_many_tokens"):
        gk.query.tokens(train, train, memory_budget="100B")


def test_a_capture_that_was_begun_without_places_goes_on_without(store, monkeypatch):
    from gradkeep.capturing import _storage

    with monkeypatch.context() as patched:
        patched.setattr(_storage, "_with_places", lambda storage, piece, tokens: storage)
        world(store)
    world(store)  # the same again is the same capture
    train = gk.gradients(store, split="train")
    assert not any("places" in name for name in train.block.names)
    with raises(QueryError, "query.no_tokens"):
        gk.query.tokens(train, train)
