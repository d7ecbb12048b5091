"""Model output functions: one output per sample, and its weight in the loss.

A task defines `get_output` for one sample, which works with any model that `torch.func` supports.
A task that also defines `measure` for a whole batch is captured layer by layer, which is far cheaper;
all tasks here do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch.func import functional_call

from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn

SIMULATED = 300


class AbstractModelOutput(ABC):
    """Base class of tasks: define the output of one sample and the weights of a batch."""

    def __init__(self) -> None:
        return

    @abstractmethod
    def get_output(self, model: nn.Module, weights: Any, buffers: Any, *sample: Tensor) -> Tensor:
        """Return f(z), a scalar, of one sample whose fields have no batch dimension."""

    @abstractmethod
    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Any, buffers: Any, batch: Iterable[Tensor]
    ) -> Tensor:
        """Return the derivative of the loss by the output, up to its sign, `[B, 1]`."""

    def measure(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return outputs `[B]` and weights `[B, 1]` of a batch from one pass; None if that is not possible.

        Define it in your own task to capture its gradients layer by layer.
        """
        return None


class _AnswerTask(AbstractModelOutput):
    """Tasks whose outputs and weights follow from the model's answer to a batch."""

    @abstractmethod
    def _call(self, batch: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the arguments and keyword arguments of the model's call."""

    @abstractmethod
    def _outputs(self, answer: Any, batch: Sequence[Tensor]) -> Tensor:
        """Return the outputs `[B]`."""

    @abstractmethod
    def _weights(self, answer: Any, batch: Sequence[Tensor]) -> Tensor:
        """Return the weights `[B, 1]`."""

    def measure(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return outputs `[B]` and weights `[B, 1]`."""
        args, kwargs = self._call(batch)
        answer = model(*args, **kwargs)
        with torch.no_grad():
            weights = self._weights(answer, batch)
        return self._outputs(answer, batch), weights

    def get_output(self, model: nn.Module, weights: Any, buffers: Any, *sample: Tensor) -> Tensor:
        """Return the output of one sample."""
        batch = [field.unsqueeze(0) for field in sample]
        answer = functional_call(model, (weights, buffers), *self._call(batch))
        return self._outputs(answer, batch).sum()

    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Any, buffers: Any, batch: Iterable[Tensor]
    ) -> Tensor:
        """Return the weights `[B, 1]`."""
        fields = list(batch)
        with torch.no_grad():
            answer = functional_call(model, (weights, buffers), *self._call(fields))
            return self._weights(answer, fields)


class _Classification(_AnswerTask):
    """Tasks with logits `[B, C]` and one label per sample.

    output = log p / (1 - p), weight = 1 - p at a temperature, where p is the label's probability.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.loss_temperature = temperature

    def _outputs(self, answer: Any, batch: Sequence[Tensor]) -> Tensor:
        return _margins(answer, batch[-1])

    def _weights(self, answer: Any, batch: Sequence[Tensor]) -> Tensor:
        # 1 - softmax, without cancellation for confident predictions.
        return torch.sigmoid(-_margins(answer / self.loss_temperature, batch[-1])).unsqueeze(1)


class ImageClassificationModelOutput(_Classification):
    """Image classification; batches are (image, label), and the model is called with the images."""

    @staticmethod
    def get_output(  # type: ignore[override] # without self, as it is called on the class too
        model: nn.Module, weights: Any, buffers: Any, image: Tensor, label: Tensor
    ) -> Tensor:
        """Return the margin of one sample."""
        logits = functional_call(model, (weights, buffers), (image.unsqueeze(0),))
        return _margins(logits, label.unsqueeze(0)).sum()

    def _call(self, batch: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return tuple(batch[:-1]), {}


class IterativeImageClassificationModelOutput(ImageClassificationModelOutput):
    """Image classification with a plain call of the model: `get_output` maps a batch to `[B]`."""

    @staticmethod
    def get_output(  # type: ignore[override]
        model: nn.Module, weights: Any, buffers: Any, images: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the margins `[B]` of a batch."""
        return _margins(model(images), labels)

    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Any, buffers: Any, batch: Iterable[Tensor]
    ) -> Tensor:
        """Return 1 - p `[B, 1]`."""
        fields = list(batch)
        with torch.no_grad():
            return self._weights(model(*fields[:-1]), fields)


class TextClassificationModelOutput(_Classification):
    """Text classification; batches are (input_ids, token_type_ids, attention_mask, label)."""

    @staticmethod
    def get_output(  # type: ignore[override]
        model: nn.Module,
        weights: Any,
        buffers: Any,
        input_id: Tensor,
        token_type_id: Tensor,
        attention_mask: Tensor,
        label: Tensor,
    ) -> Tensor:
        """Return the margin of one sample."""
        named = {
            "input_ids": input_id.unsqueeze(0),
            "token_type_ids": token_type_id.unsqueeze(0),
            "attention_mask": attention_mask.unsqueeze(0),
        }
        logits = functional_call(model, (weights, buffers), (), named)
        return _margins(logits, label.unsqueeze(0)).sum()

    def _call(self, batch: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        names = ("input_ids", "token_type_ids", "attention_mask")
        return (), dict(zip(names, batch[:-1], strict=True))


class LanguageModelingModelOutput(_AnswerTask):
    """Language modeling; batches are (input_ids, attention_mask, labels), labels of -100 are ignored.

    output = sum over predicted tokens of log p / (1 - p), weight = mean of their 1 - p. Token t is
    predicted at position t - 1.
    """

    def _call(self, batch: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (), {"input_ids": batch[0], "attention_mask": batch[1]}

    def _outputs(self, answer: Any, batch: Sequence[Tensor]) -> Tensor:
        return _token_margins(answer, batch[2])[0].sum(1)

    def _weights(self, answer: Any, batch: Sequence[Tensor]) -> Tensor:
        margins, counted = _token_margins(answer, batch[2])
        share = torch.where(counted, torch.sigmoid(-margins), 0).sum(1, keepdim=True)
        return share / counted.sum(1, keepdim=True).clamp(min=1)


class CLIPModelOutput(_AnswerTask):
    """CLIP; batches are (image, text), and the model returns (image embeddings, text embeddings, scale).

    With phi and psi the embeddings of a pair and B a batch of others,
    output = -logsumexp(-phi . (psi - psi_B)) - logsumexp(-psi . (phi - phi_B)). The batch B is
    drawn once from the embeddings that `get_embeddings` computes, and stored in this instance: the
    output of a pair does not depend on the other pairs of its batch. Its weight is
    1 - the mean probability of the pair among itself and B.
    """

    image_embeddings: Tensor | None = None
    text_embeddings: Tensor | None = None
    num_computed_embeddings = 0
    sim_batch_size = 0

    def __init__(
        self, temperature: float | None = None, simulated_batch_size: int = SIMULATED
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.sim_batch_size = simulated_batch_size

    def get_embeddings(
        self,
        model: nn.Module,
        loader: Iterable[Sequence[Tensor]],
        batch_size: int | None = None,
        embedding_dim: int | None = None,
        size: int = 50_000,
        preprocess_fn_img: Callable[[Any], Tensor] | None = None,
        preprocess_fn_txt: Callable[[Any], Tensor] | None = None,
    ) -> None:
        """Embed up to `size` pairs of a loader, and draw the batch B from them.

        The sizes of batches and embeddings are detected; the arguments of the released package are accepted.
        """
        images, texts, count = [], [], 0
        with torch.no_grad():
            for image, text in loader:
                shown = image if preprocess_fn_img is None else preprocess_fn_img(image)
                read = text if preprocess_fn_txt is None else preprocess_fn_txt(text)
                one, other, _ = model(image=shown, text=read)
                images.append(one[: size - count].clone())
                texts.append(other[: size - count].clone())
                count += len(images[-1])
                if count >= size:
                    break
        if not count:
            raise AttributionError("the loader is empty", code="compat.empty_loader")
        chosen = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        chosen = chosen[: self.sim_batch_size].to(images[0].device)
        self.num_computed_embeddings = count
        self.image_embeddings = torch.cat(images)[chosen]
        self.text_embeddings = torch.cat(texts)[chosen]

    def _call(self, batch: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (), {"image": batch[0], "text": batch[1]}

    def _simulated_batch(self) -> tuple[Tensor, Tensor]:
        if self.image_embeddings is None or self.text_embeddings is None:
            raise AttributionError(
                "the embeddings of other pairs are missing",
                code="compat.no_embeddings",
                fix="Run traker.task.get_embeddings(model, loader) before featurizing.",
            )
        return self.image_embeddings, self.text_embeddings

    def _outputs(self, answer: Any, batch: Sequence[Tensor]) -> Tensor:
        image, text, _ = answer
        images, texts = self._simulated_batch()
        own = (image * text).sum(1, keepdim=True)
        one = -torch.logsumexp(image @ texts.T - own, 1)
        return one - torch.logsumexp(text @ images.T - own, 1)

    def _weights(self, answer: Any, batch: Sequence[Tensor]) -> Tensor:
        image, text, scale = answer
        images, texts = self._simulated_batch()
        by = scale if self.temperature is None else self.temperature
        own = (image * text).sum(1, keepdim=True)
        one = torch.softmax(by * torch.cat([own, image @ texts.T], 1), 1)[:, :1]
        other = torch.softmax(by * torch.cat([own, text @ images.T], 1), 1)[:, :1]
        return 1 - (one + other) / 2


TASK_TO_MODELOUT: dict[str, type[AbstractModelOutput]] = {
    "image_classification": ImageClassificationModelOutput,
    "clip": CLIPModelOutput,
    "text_classification": TextClassificationModelOutput,
    "iterative_image_classification": IterativeImageClassificationModelOutput,
    "language_modeling": LanguageModelingModelOutput,
}


def _margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log p / (1 - p) of the labels, over the last dimension."""
    # Compared, not indexed: torch.func supports neither item() nor indexed writes.
    own = torch.arange(logits.shape[-1], device=logits.device) == labels.unsqueeze(-1)
    right = torch.where(own, logits, 0).sum(-1)
    return right - torch.where(own, -torch.inf, logits).logsumexp(-1)


def _token_margins(answer: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return margins `[B, T - 1]`, zero where ignored, and the mask of counted ones."""
    logits = answer if isinstance(answer, torch.Tensor) else answer.logits
    targets = labels[:, 1:]
    counted = targets >= 0
    margins = _margins(logits[:, :-1], targets.clamp(min=0))
    return torch.where(counted, margins, 0), counted
