"""The way for few targets against coordinate descent, written out."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradkeep.datamodels._counts import DenseGram
from gradkeep.datamodels._l1 import PenalizedProblem, SolverState, solve_by_active_sets


def one_by_one(gram, c, lam, ridge):
    """Coordinate descent in float64, until nothing moves."""
    x = np.zeros(len(c))
    for _ in range(3000):
        before = x.copy()
        for j in range(len(c)):
            pull = c[j] - gram[j] @ x + gram[j, j] * x[j]
            x[j] = np.sign(pull) * max(0.0, abs(pull) - lam) / (gram[j, j] + ridge)
        if np.abs(x - before).max() < 1e-10:
            break
    return x


@given(
    st.integers(1, 14),
    st.integers(20, 60),
    st.floats(0.01, 1.2),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
    st.integers(0, 2**31),
)
@settings(max_examples=50, deadline=None)
def test_it_is_what_coordinate_descent_finds(n, m, fraction, ridge, warm, seed):
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((m, n)) + 0.5 * rng.standard_normal((m, 1))
    z = (z - z.mean(0)) / z.std(0)
    y = z @ np.where(rng.random(n) < 0.5, rng.standard_normal(n), 0) + rng.standard_normal(m)
    y = (y - y.mean()) / y.std()
    gram, c = z.T @ z / m, z.T @ y / m
    lam = fraction * np.abs(c).max()
    expected = one_by_one(gram, c, lam, ridge)
    start = rng.standard_normal(n) * (rng.random(n) < 0.5) if warm else np.zeros(n)
    row = [torch.from_numpy(part).float()[None] for part in (c, start, gram @ start)]
    problem = PenalizedProblem(
        row[0], torch.ones(1), torch.tensor([lam]).float(), torch.tensor([ridge]).float()
    )
    state = SolverState(row[1], row[2])
    dense = DenseGram(torch.from_numpy(gram).float())
    gap = solve_by_active_sets(dense, problem, state, tolerance=1e-5)
    if gap is None:  # another way finishes, from a state that is no worse than the first
        return
    assert float(gap[0]) <= 1e-5
    fitted = state.x[0].double().numpy()

    def value(x):
        return x @ gram @ x / 2 - c @ x + lam * np.abs(x).sum() + ridge / 2 * x @ x

    assert value(fitted) <= value(expected) + 1e-5
