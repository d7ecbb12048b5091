"""Whose gradients a Fisher matrix is made of: of given labels, or of labels from the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from gradkeep.errors import AttributionError
from gradkeep.store import CaptureKey

if TYPE_CHECKING:
    from gradkeep.attribution._question import CheckpointView
    from gradkeep.query import Gradients

Kind = Literal["empirical", "sampled"]


def fisher_gradients(at: CheckpointView, *, kind: Kind, name: str) -> Gradients:
    """The training rows' own gradients, or those of the capture with drawn labels."""
    train = at.train()
    if kind == "empirical":
        return train
    if kind != "sampled":
        raise AttributionError(f"no Fisher matrix {kind!r}", expected="'empirical' or 'sampled'")
    question, place = at.question, at.place
    key = CaptureKey(place.checkpoint, question.train, place.run, name)
    if key not in question.store.captures():
        run = "" if place.run == "main" else f", run={place.run!r}"
        raise AttributionError(
            f"no capture {name!r} of {question.train} with labels drawn from the model at "
            f"{str(place)!r}",
            path=question.store.location,
            fix="gk.capture(store, model, loader, task=gk.Classification(labels='sampled'), "
            f"split={question.train!r}, checkpoint={place.checkpoint!r}{run}, name={name!r})",
        )
    drawn = at.train(name=name)
    for layer, form in train.forms.items():
        if layer not in drawn.forms or drawn.forms[layer].parameters != form.parameters:
            raise AttributionError(
                f"the capture {name!r} does not hold layer {layer} as {question.train} does",
                found=", ".join(drawn.forms),
                fix="capture both with the same layers=, or pass layers= here",
            )
    return drawn
