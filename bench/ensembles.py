"""Many small models trained stacked, against the same models trained one after the other.

Multilayer perceptrons on random halves of the digits; same initial weights, same batches, one thread,
CPU time, the median of three rounds. Also prints the largest difference of the logits, relative to
the largest logit. `./x bench ensembles [--quick]`
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import torch

from gradkeep.data import load_digits
from gradkeep.datamodels import Training, draw_masks
from gradkeep.datamodels._training import MANY, TOLERANCE, stacks_well, train_many

BAR = 5.0  # with 32 hidden units
ROUNDS, MODELS = 3, 64


def cpu_seconds(function):
    began = time.process_time()
    result = function()
    return time.process_time() - began, result


def perceptron(hidden):
    def make():
        return torch.nn.Sequential(
            torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)
        )

    return make


def train_stacked(training, inputs, labels, subsets, test):
    """Return the logits of all models, trained as many at a time as in a study."""
    answers = []
    for start in range(0, MODELS, MANY):
        seeds = list(range(start, start + MANY))
        _, ask = train_many(training, inputs, labels, subsets[start : start + MANY], seeds)
        answers.append(ask(test))
    return torch.cat(answers)


def measure(hidden, batch_size, epochs):
    digits = load_digits()
    inputs, labels = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    test = torch.from_numpy(digits.test_images)
    training = Training(perceptron(hidden), epochs, batch_size, lr=0.1, options={"momentum": 0.9})
    masks = draw_masks(0, range(MODELS), num_examples=len(labels))
    subsets = torch.from_numpy(np.stack([np.flatnonzero(mask) for mask in masks]))
    chosen = stacks_well(training, inputs, labels, subsets.shape[1])
    seeds = list(range(MODELS))
    ratios, difference = [], 0.0
    for _ in range(ROUNDS):  # alternating, so that other load affects both alike
        together, logits = cpu_seconds(
            lambda: train_stacked(training, inputs, labels, subsets, test)
        )
        alone, models = cpu_seconds(
            lambda: [
                training.train_one(inputs[rows], labels[rows], seed)
                for rows, seed in zip(subsets, seeds, strict=True)
            ]
        )
        with torch.no_grad():
            expected = torch.stack([model(test) for model in models])
        difference = max(difference, float((logits - expected).abs().max() / expected.abs().max()))
        ratios.append(alone / together)
    return statistics.median(ratios), difference, chosen


def main():
    torch.set_num_threads(1)
    epochs = 3 if "--quick" in sys.argv else 10
    print(
        f"{MODELS} models, {MANY} at a time, {epochs} epochs; times faster than one after the other"
    )
    missed = []
    for hidden, batch_size in ((32, 64), (32, 16), (128, 64), (512, 64)):
        ratio, difference, chosen = measure(hidden, batch_size, epochs)
        print(
            f"hidden {hidden:>3}, batches of {batch_size}: {ratio:5.1f}x, logits {difference:.1e} apart, "
            f"{'stacked' if chosen else 'one by one'} by default"
        )
        if hidden == 32 and (ratio < BAR or difference > TOLERANCE):
            missed.append((hidden, batch_size))
    sys.exit(f"below {BAR:g}x or not the same: {missed}" if missed else 0)


if __name__ == "__main__":
    main()
