"""One small world for all methods: a model, its data, captures, and the truth in float64."""

import copy
import tempfile
from dataclasses import dataclass, field

import pytest
import torch
from autograd_reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import gradkeep as gk

CLASSES = 3


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def margins(model, batch):
    logits = model(batch[0])
    own = F.one_hot(batch[1], logits.shape[1]).bool()
    right = logits.masked_fill(~own, 0).sum(1)
    return right - logits.masked_fill(own, -torch.inf).logsumexp(1)


MEASURES = {"loss": losses, "output": margins}


@dataclass
class World:
    """A store with captures of both splits, the model that they are of, and their data."""

    store: gk.Store
    model: nn.Module
    data: dict
    states: dict = field(default_factory=dict)
    """The weights of each checkpoint, where there are several."""

    def double(self, at=None):
        """The model in float64, at a checkpoint."""
        model = copy.deepcopy(self.model)
        if at is not None:
            model.load_state_dict(self.states[at])
        return model.double()

    def batch(self, split):
        """The rows of a split in float64."""
        x, y = self.data[split]
        return (x.double() if x.is_floating_point() else x), y

    def margins(self, split, *, at=None):
        """The outputs `[B]` that classification explains, in float64."""
        return margins(self.double(at), self.batch(split)).detach()

    def gradients(self, split, *, layer="", at=None, of="loss"):
        """Per-sample gradients `[B, P]` by autograd, of all parameters below a layer."""
        actual = per_sample_gradients(self.double(at), MEASURES[of], self.batch(split))
        return torch.cat([v.flatten(1) for k, v in actual.items() if k.startswith(layer)], 1)


@pytest.fixture(scope="session")
def make_world():
    """`make_world(make_model, shape, ...)`; a whole number for shape draws that many tokens.

    `twins` are pairs of training rows with equal inputs, `checkpoints` are names of random weights, or a mapping to what `gk.Weights` is told of them.
    """

    def make(
        make_model,
        shape,
        *,
        seed=0,
        rows=14,
        queries=5,
        length=5,
        twins=(),
        checkpoints=(),
        **options,
    ):
        torch.manual_seed(seed)
        model, store, data = make_model(), gk.open(tempfile.mkdtemp()), {}
        for split, count in (("train", rows), ("test", queries)):
            tokens = isinstance(shape, int)
            x = torch.randint(shape, (count, length)) if tokens else torch.randn(count, *shape)
            data[split] = (x, torch.arange(count) % CLASSES)
        for one, other in twins:
            data["train"][0][one] = data["train"][0][other]
        drawn = model.state_dict()
        states = {n: {k: torch.randn_like(v) for k, v in drawn.items()} for n in checkpoints}
        if states:
            reported = checkpoints if isinstance(checkpoints, dict) else {}
            options["checkpoints"] = {
                n: gk.Weights(state, **reported.get(n, {})) for n, state in states.items()
            }
        options = {"task": gk.Classification(), "progress": False, **options}
        for split, batch in data.items():
            gk.capture(store, model, [batch], split=split, **options)
        return World(store, model, data, states)

    return make
