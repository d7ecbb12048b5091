"""Digits for the page to show, and how to wait for its answers."""

import time

import torch

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.data import load_digits
from gradkeep.datamodels import Training

TOKEN = "t0ken" * 5
TRAIN, TEST = 160, 40
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WRONG = [3, 50, 71, 120]
"""Training rows whose labels are not what the picture shows."""


def network():
    return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))


def digits():
    """Inputs and labels of both splits; some labels of the first are wrong."""
    answer = load_digits()
    labels = torch.from_numpy(answer.train_labels[:TRAIN]).clone()
    labels[WRONG] = (labels[WRONG] + 3) % 10
    train = torch.from_numpy(answer.train_images[:TRAIN]), labels
    return train, (
        torch.from_numpy(answer.test_images[:TEST]),
        torch.from_numpy(answer.test_labels[:TEST]),
    )


def recipe():
    train, test = digits()
    training = Training(network, epochs=3, batch_size=32, lr=0.1, options={"momentum": 0.9})
    return evaluate.Recipe(train, test, training)


def previews():
    (images, _), (others, _) = digits()
    return {
        "train": gk.Preview(image=lambda row: images[row].view(8, 8), classes=NAMES),
        "test": gk.Preview(image=others.view(-1, 8, 8), classes=NAMES),
    }


def settled(client, url, *, seconds=60, post=None):
    """The response once nothing is worked on any more; `post` begins it."""
    until = time.monotonic() + seconds
    answer = None if post is None else client.post(url, json=post)
    while True:
        answer = client.get(url) if answer is None else answer
        body = answer.json() if answer.headers["content-type"] == "application/json" else {}
        answers = body.get("answers", ()) if isinstance(body, dict) else ()
        if answer.status_code != 202 and not any(one["working"] for one in answers):
            return answer
        assert time.monotonic() < until, f"{url} takes too long: {body}"
        time.sleep(0.05)
        answer = None
