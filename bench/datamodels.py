"""Accuracy of datamodels of the digits: on held-out models, and for training without the top examples.

A thousand perceptrons on random halves of the digits, trained stacked. A fifth of them are held out.
Prints the correlation of predicted and true margins over these, per test digit in quantiles and
against the number of models fitted, beside that of ridge and of differences of means on the same
models. Then removes the fifty examples that help a test digit most (fewer if fewer help), and as many
at random, and retrains. One thread, about four minutes. `./x bench datamodels [--quick]`
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import numpy as np
import torch

from gradkeep import datamodels as dm
from gradkeep.data import load_digits

REMOVED = 50
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
HELD_OUT = 0.2


def perceptron():
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def train_models(store, models, targets):
    """Train all models of the study; only the first `targets` test digits are used."""
    digits = load_digits()
    train = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    test = (
        torch.from_numpy(digits.test_images[:targets]),
        torch.from_numpy(digits.test_labels[:targets]),
    )
    training = dm.Training(perceptron, epochs=15, batch_size=64, options={"momentum": 0.9})
    study = dm.Study(
        store,
        train,
        training,
        num_models=models,
        outputs=dm.margins(test),
        stacked=True,
    )
    began = time.perf_counter()
    assert study.run(workers=0, threads=1).complete
    masks, margins = study.masks(), study.outputs()
    print(
        f"{models} models on halves of {masks.num_examples} digits, {targets} targets: "
        f"{time.perf_counter() - began:.0f} s, {(margins > 0).mean():.1%} of answers right"
    )
    return study


def print_correlations(study):
    """Print correlations on held-out models; return that of L1 with all other models."""
    masks, margins = study.masks(), study.outputs()
    curves = {
        penalty: dm.learning_curve(masks, margins, held_out=HELD_OUT, penalty=penalty)
        for penalty in ("l1", "ridge", "means")
    }
    best = curves["l1"].correlations[-1]
    print(f"\nheld-out correlation of margins, mean over targets; {best.models} models held out")
    print("models      l1  [95 %]            ridge   means   l1 / means")
    for place, size in enumerate(curves["l1"].models):
        one = curves["l1"].correlations[place]
        ridge, means = curves["ridge"].mean[place], curves["means"].mean[place]
        print(
            f"{size:6d}   {one.mean:.3f}  [{one.mean_low:.3f}, {one.mean_high:.3f}]   "
            f"{ridge:.3f}   {means:.3f}   {f'{one.mean / means:.2f}x' if means > 0 else '-'}"
        )
    print("\nper target, with all models that are not held out")
    print("quantile  " + "".join(f"{part:>8.0%}" for part in QUANTILES))
    for penalty, curve in curves.items():
        values = np.nanquantile(curve.correlations[-1].value, QUANTILES)
        print(f"{penalty:8}  " + "".join(f"{value:8.3f}" for value in values))
    print(
        f"no weight predicts better than any for {len(best.constant_predictions)} targets under "
        f"l1 (they count as 0); outputs never changed for {len(best.constant_outputs)}"
    )
    return best


def print_removals(study, targets, repeats):
    """Retrain without the top examples of some targets, and without as many at random."""
    fitted = study.fit()
    rng = np.random.default_rng(0)
    chosen = np.sort(rng.permutation(fitted.weights.shape[1])[:targets])
    best = dm.top(fitted, len(fitted.weights), targets=chosen)
    # From a half, as in the fit: with all examples, a margin depends less on each one.
    half = dm.draw_masks(10**6, [0], num_examples=len(fitted.weights))[0]
    for what, base in (("a half", half), ("all", np.ones_like(half))):
        helping = [ids[ids >= 0] for ids in best.positive]
        tops = [ids[base[ids]][:REMOVED] for ids in helping]
        randoms = [rng.permutation(np.flatnonzero(base))[: len(ids)] for ids in tops]
        removals = study.verify_removals(
            fitted, [*tops, *randoms], base=base, repeats=repeats, workers=0, threads=1
        )
        places = np.arange(targets)
        own, expected = removals.measured[places, chosen], removals.predicted[places, chosen]
        control = removals.measured[targets + places, chosen]
        expected_control = removals.predicted[targets + places, chosen]
        error = removals.standard_error[places, chosen]
        slope, _ = statistics.linear_regression(expected.tolist(), own.tolist())
        print(
            f"\nwithout the {statistics.mean(map(len, tops)):.3g} examples that help each of "
            f"{targets} targets most, from {what} of the examples, {repeats} trainings each\n"
            f"  change of its margin   predicted {expected.mean():+.2f}   measured {own.mean():+.2f}"
            f"   (standard error of one {np.median(error):.2f})\n"
            f"  as many at random      predicted {expected_control.mean():+.2f}   measured {control.mean():+.2f}\n"
            f"  fell for {np.count_nonzero(own < 0)} of {targets}; correlation over these targets "
            f"{statistics.correlation(expected.tolist(), own.tolist()):.2f}, slope {slope:.2f}; over all "
            f"removals and targets {removals.correlation:.2f}"
        )


def main() -> None:
    quick = "--quick" in sys.argv[1:]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as store:
        study = train_models(store, *((200, 40) if quick else (1000, 360)))
        best = print_correlations(study)
        print_removals(study, *((4, 2) if quick else (24, 8)))
    sys.exit("the fit predicts nothing" if not best.mean_low > 0 else 0)


if __name__ == "__main__":
    main()
