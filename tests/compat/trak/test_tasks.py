"""Every task: the output of a batch is that of its samples, and their gradients agree."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

from gradkeep.compat.trak import TRAKer
from gradkeep.compat.trak.modelout_functions import (
    TASK_TO_MODELOUT,
    AbstractModelOutput,
    CLIPModelOutput,
    ImageClassificationModelOutput,
    LanguageModelingModelOutput,
    TextClassificationModelOutput,
)
from gradkeep.curvature._project import project_parameters
from gradkeep.curvature._sketches import Projection
from gradkeep.errors import AttributionError

B, T, V = 9, 6, 11


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.kinds = nn.Embedding(V, 8), nn.Embedding(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids, token_type_ids, attention_mask):
        hidden = (self.words(input_ids) + self.kinds(token_type_ids)) * attention_mask[..., None]
        return self.head(torch.tanh(hidden.sum(1)))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(V, 8), nn.Linear(8, 8), nn.Linear(8, V)

    def forward(self, input_ids, attention_mask):
        hidden = self.words(input_ids) * attention_mask[..., None]
        hidden = torch.tanh(self.mix(hidden.cumsum(1)))
        return SimpleNamespace(logits=self.head(hidden))


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(5, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        one, other = self.image(image), self.text(text)
        return (
            one / one.norm(dim=1, keepdim=True),
            other / other.norm(dim=1, keepdim=True),
            self.scale.exp(),
        )


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.grouped = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=2)
        self.norm, self.scale = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, images):
        hidden = torch.relu(self.norm(self.first(images)))
        return self.head(torch.relu(self.scale(self.grouped(hidden))).mean((2, 3)))


def setting(name):
    torch.manual_seed(3)
    mask = torch.ones(B, T, dtype=torch.long)
    mask[:, 4:] = 0
    words = torch.randint(V, (B, T))
    if name == "image_classification":
        batch = [torch.randn(B, 1, 5, 5), torch.randint(3, (B,))]
        return Images().eval(), ImageClassificationModelOutput(), batch
    if name == "text_classification":
        batch = [words, torch.randint(2, (B, T)), mask, torch.randint(3, (B,))]
        return Text(), TextClassificationModelOutput(temperature=2.0), batch
    if name == "language_modeling":
        labels = words.masked_fill(mask == 0, -100)
        return Language(), LanguageModelingModelOutput(), [words, mask, labels]
    model = Pairs()
    task = CLIPModelOutput(simulated_batch_size=7)
    loader = [(torch.randn(5, 5), torch.randn(5, 6)) for _ in range(3)]
    task.get_embeddings(model, loader, batch_size=5, embedding_dim=4, size=12)
    assert task.num_computed_embeddings == 12
    assert task.image_embeddings.shape == (7, 4)
    return model, task, [torch.randn(B, 5), torch.randn(B, 6)]


NAMES = ["image_classification", "text_classification", "language_modeling", "clip"]


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_its_samples(name):
    model, task, batch = setting(name)
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    outputs, share = task.measure(model, batch)
    assert share.shape == (B, 1)
    singly = [
        task.get_output(model, weights, buffers, *(field[row] for field in batch))
        for row in range(B)
    ]
    assert torch.allclose(outputs, torch.stack(singly), atol=1e-5)
    assert torch.allclose(task.get_out_to_loss_grad(model, weights, buffers, batch), share)
    halves = [
        task.measure(model, [field[part] for field in batch])[1]
        for part in (slice(0, 4), slice(4, B))
    ]
    assert torch.allclose(torch.cat(halves), share, atol=1e-6)
    assert bool((share > 0).all())
    assert bool((share < 1).all())


def test_the_outputs_are_what_they_say():
    model, task, batch = setting("language_modeling")
    logits = model(*batch[:2]).logits
    p = torch.softmax(logits, 2)[0, :-1].gather(1, batch[0][0, 1:, None])[:, 0][:3]
    outputs, share = task.measure(model, batch)
    assert torch.allclose(outputs[0], (p / (1 - p)).log().sum(), atol=1e-4)
    assert torch.allclose(share[0, 0], (1 - p).mean(), atol=1e-5)
    model, task, batch = setting("text_classification")
    logits = model(*batch[:3])
    p = torch.softmax(logits, 1)[torch.arange(B), batch[3]]
    warm = torch.softmax(logits / 2, 1)[torch.arange(B), batch[3]]
    outputs, share = task.measure(model, batch)
    assert torch.allclose(outputs, (p / (1 - p)).log(), atol=1e-4)
    assert torch.allclose(share[:, 0], 1 - warm, atol=1e-5)
    model, task, batch = setting("clip")
    one, other, scale = model(*batch)
    first = -torch.logsumexp(-one[0] @ (other[0] - task.text_embeddings).T, 0)
    second = -torch.logsumexp(-other[0] @ (one[0] - task.image_embeddings).T, 0)
    outputs, share = task.measure(model, batch)
    assert torch.allclose(outputs[0], first + second, atol=1e-5)
    against = torch.stack([one[0] @ other[0], *(one[0] @ task.text_embeddings.T)])
    along = torch.stack([one[0] @ other[0], *(other[0] @ task.image_embeddings.T)])
    mean = (torch.softmax(scale * against, 0)[0] + torch.softmax(scale * along, 0)[0]) / 2
    assert torch.allclose(share[0, 0], 1 - mean, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_layers_give_what_torch_func_gives(name, tmp_path):
    model, task, batch = setting(name)
    results, calls = [], []
    for folder in ("layers", "func"):
        t = TRAKer(
            model,
            task,
            B,
            tmp_path / folder,
            device="cpu",
            proj_dim=40,
            use_half_precision=False,
            logging_level=logging.ERROR,
        )
        if folder == "func":
            t._tracer = None
        else:
            t.gradient_computer.compute_per_sample_grad = lambda batch: calls.append(1)
        t.load_checkpoint(model.state_dict(), 0)
        t.featurize(batch, num_samples=B)
        results.append(np.array(t.saver.current_store["grads"]))
    assert not calls
    assert np.abs(results[0]).max() > 0
    assert np.allclose(results[0], results[1], atol=1e-4 * np.abs(results[0]).max())


def test_embeddings_are_needed_and_belong_to_one_task(tmp_path):
    model, task, batch = setting("clip")
    assert CLIPModelOutput().image_embeddings is None
    with raises(AttributionError, "compat.no_embeddings", fix="get_embeddings"):
        CLIPModelOutput().measure(model, batch)
    with raises(AttributionError, "compat.empty_loader"):
        CLIPModelOutput().get_embeddings(model, [])
    t = TRAKer(model, "clip", B, tmp_path, device="cpu", logging_level=logging.ERROR)
    t.task.get_embeddings(model, [batch], B, 4, preprocess_fn_img=lambda x: x)
    assert t.task.image_embeddings is not task.image_embeddings


def test_tasks_have_their_names():
    assert {
        "image_classification",
        "clip",
        "text_classification",
        "iterative_image_classification",
    } <= set(TASK_TO_MODELOUT)


class Squared(AbstractModelOutput):
    """As a task of one's own is written for the released package."""

    def __init__(self):
        super().__init__()

    @staticmethod
    def get_output(model, weights, buffers, x, y):
        answer = torch.func.functional_call(model, (weights, buffers), x.unsqueeze(0))
        return (answer - y).square().sum()

    def get_out_to_loss_grad(self, model, weights, buffers, batch):
        return torch.ones(len(batch[0]), 1)


def test_a_task_of_ones_own(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    batch = [torch.randn(B, 3), torch.randn(B)]
    t = TRAKer(
        model,
        Squared(),
        B,
        tmp_path,
        device="cpu",
        proj_dim=64,
        use_half_precision=False,
        logging_level=logging.ERROR,
    )
    t.load_checkpoint(model.state_dict(), 0)
    t.featurize(batch, num_samples=B)
    residual = 2 * (model(batch[0]) - batch[1][:, None]).detach()
    exact = {"weight": (residual * batch[0]).unsqueeze(1), "bias": residual}
    expected = project_parameters(exact, Projection(dim=64)) * (64 / 4) ** 0.5
    assert np.allclose(t.saver.current_store["grads"], expected, atol=1e-4)
