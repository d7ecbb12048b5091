"""Random programs with the shape of real training steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.remat import Op, Program, ProgramStep, StepKind

if TYPE_CHECKING:
    import random


def training_program(rng: random.Random, layers: int) -> Program:
    """Layers with skips, then gradients that read the activations."""
    ops: list[Op] = []
    steps: list[ProgramStep] = []

    def run(args: list[int], *, backward: bool = False) -> int:
        number = len(ops)
        steps.append(ProgramStep(StepKind.RUN, number))
        size, cost = rng.choice((1, 2, 4, 8)), rng.randint(1, 20)
        ops.append(Op("op", cost, tuple(args), (number,), (size,), (-1,), backward))
        return number

    forward = [run([])]
    for _ in range(layers - 1):
        skip = [forward[-2]] if len(forward) > 1 and rng.random() < 0.3 else []
        forward.append(run([forward[-1], *skip]))
    gradient = run([forward[-1]], backward=True)
    for activation in reversed(forward[:-1]):
        after = run([gradient, activation], backward=True)
        steps.extend(ProgramStep(StepKind.RELEASE, old) for old in (gradient, activation))
        gradient = after
    steps.append(ProgramStep(StepKind.PIN, gradient))
    return Program(tuple(ops), tuple(steps), tuple(f"t{at}" for at in range(len(ops))))
