"""Small programs made by hand, for tests, examples and the optimum."""

from __future__ import annotations

from gradkeep.remat._program import CONSTANT, Kind, Op, Program, Step


def chain(length: int, *, size: int = 1, cost: int = 1) -> Program:
    """A chain of `length` forward operators and their backward ones, all of one size and cost.

    Backward operator i reads the gradient so far and the i-th activation.

    >>> len(chain(3).ops)
    7
    """
    ops = [Op(CONSTANT, 0, (), (0,), (size,), (-1,))]
    steps = [Step(Kind.RUN, 0), Step(Kind.PIN, 0)]
    names = ["input"]

    def run(name: str, args: tuple[int, ...], *, backward: bool) -> int:
        number = len(names)
        names.append(f"{name}{number}")
        steps.append(Step(Kind.RUN, len(ops)))
        ops.append(Op(name, cost, args, (number,), (size,), (-1,), backward))
        return number

    forward = [0]
    for _ in range(length):
        forward.append(run("forward", (forward[-1],), backward=False))
    gradient = forward.pop()
    for activation in reversed(forward):
        after = run("backward", (gradient, activation), backward=True)
        steps.append(Step(Kind.RELEASE, gradient))
        if activation:
            steps.append(Step(Kind.RELEASE, activation))
        gradient = after
    steps.append(Step(Kind.PIN, gradient))
    return Program(tuple(ops), tuple(steps), tuple(names))
