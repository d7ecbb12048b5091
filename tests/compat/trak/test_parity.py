"""The released formulas, transcribed in float64, and the parts that can be exchanged."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from gradkeep.compat.trak import TRAKer
from gradkeep.compat.trak.gradient_computers import (
    FunctionalGradientComputer,
    IterativeGradientComputer,
)
from gradkeep.compat.trak.modelout_functions import ImageClassificationModelOutput
from gradkeep.compat.trak.projectors import BasicProjector, NoOpProjector
from gradkeep.compat.trak.savers import AbstractSaver
from gradkeep.compat.trak.score_computers import (
    BasicScoreComputer,
    BasicSingleBlockScoreComputer,
)
from gradkeep.curvature._project import dense_matrix
from gradkeep.curvature._sketches import Projection
from gradkeep.errors import AttributionError

N, M, D, C = 50, 7, 6, 3
made = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, D, generator=made), torch.randint(C, (N,), generator=made)
XT, YT = torch.randn(M, D, generator=made), torch.randint(C, (M,), generator=made)


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, C))


def gradients(model, x, y):
    """Gradients of log p / (1 - p), and 1 - p, one sample after the other in float64."""
    rows, weights = [], []
    model = model.double()
    for one, label in zip(x.double(), y, strict=True):
        p = torch.softmax(model(one), 0)[label]
        grads = torch.autograd.grad((p / (1 - p)).log(), list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
        weights.append(1 - p.detach())
    model.float()
    return torch.stack(rows), torch.stack(weights)


def by_formula(seeds, k, ridge, kind="normal"):
    """[n, m] scores as the paper's code computes them."""
    means, weights = 0, 0
    for number, seed in enumerate(seeds):
        train, q = gradients(network(seed), X, Y)
        test, _ = gradients(network(seed), XT, YT)
        p = train.shape[1]
        matrix = torch.eye(p).double()
        if k:
            matrix = dense_matrix(p, Projection(kind, k, 4), model=number).double()
        x, g = train @ matrix / p**0.5, test @ matrix / p**0.5
        inverse = torch.linalg.inv(x.T @ x + ridge * torch.eye(x.shape[1]).double())
        inverse /= inverse.abs().mean()
        means = means + x @ inverse @ g.T / len(seeds)
        weights = weights + q / len(seeds)
    return (means * weights[:, None]).numpy()


def run(folder, seeds=(0,), task="image_classification", **options):
    options = {"proj_dim": 20, "use_half_precision": False} | options
    t = TRAKer(network(0), task, N, folder, device="cpu", logging_level=logging.ERROR, **options)
    for number, seed in enumerate(seeds):
        t.load_checkpoint(network(seed).state_dict(), number)
        t.featurize((X, Y), num_samples=N)
    t.finalize_features()
    for number, seed in enumerate(seeds):
        t.start_scoring_checkpoint("test", network(seed).state_dict(), number, M)
        t.score((XT, YT), num_samples=M)
    return t, np.array(t.finalize_scores("test"))


def close(actual, truth, tolerance=1e-3):
    assert np.abs(truth).max() > 0
    assert np.abs(actual - truth).max() < tolerance * np.abs(truth).max()


SIZE = 83  # (6 + 1) * 8 + (8 + 1) * 3


@pytest.mark.parametrize("kind", ["normal", "rademacher"])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_the_released_formula(tmp_path, kind, ridge, seeds):
    projector = BasicProjector(SIZE, 20, 4, kind, "cpu")
    _, scores = run(tmp_path, seeds, projector=projector, lambda_reg=ridge)
    close(scores, by_formula(seeds, 20, ridge, kind))


def test_the_released_formula_without_projecting(tmp_path):
    _, scores = run(tmp_path, projector=NoOpProjector(), lambda_reg=0.1)
    close(scores, by_formula((0,), 0, 0.1))


@pytest.mark.parametrize("dim", [20, 64])  # fewer and more than rows
def test_the_relative_ridge(tmp_path, dim):
    t, scores = run(tmp_path, proj_dim=dim)
    train, q = gradients(network(0), X, Y)
    test, _ = gradients(network(0), XT, YT)
    x = torch.from_numpy(np.array(t.saver.current_store["grads"])).double()
    g = torch.from_numpy(np.array(t.saver.current_store["test_grads"])).double()
    # The sketch keeps inner products, at the released scale of k / p.
    truth = train @ test.T * dim / SIZE
    assert float((x @ g.T - truth).norm() / truth.norm()) < 1
    ridge = float(x.square().sum()) / min(N, dim)
    solved = torch.linalg.solve(x.T @ x + ridge * torch.eye(dim).double(), g.T)
    close(scores, (x @ solved * q[:, None]).numpy())


@pytest.mark.parametrize("computer", [BasicScoreComputer, BasicSingleBlockScoreComputer])
def test_score_computers_by_name(tmp_path, computer):
    projector = BasicProjector(SIZE, 20, 4, "normal", "cpu")
    _, scores = run(tmp_path, projector=projector, score_computer=computer, lambda_reg=0.3)
    close(scores, by_formula((0,), 20, 0.3))


def test_gradient_computers_give_the_same(tmp_path):
    results = [
        run(tmp_path / "layers")[1],
        run(
            tmp_path / "iterative",
            task="iterative_image_classification",
            gradient_computer=IterativeGradientComputer,
        )[1],
        run(tmp_path / "vectorised", task=Custom())[1],
    ]
    close(results[1], results[0])
    close(results[2], results[0])


class Custom(ImageClassificationModelOutput):
    """Gives single samples only."""

    def measure(self, model, batch):
        return None


@pytest.mark.parametrize("task", ["image_classification", Custom()])
def test_only_the_chosen_parameters_are_differentiated(tmp_path, task):
    t, scores = run(tmp_path, task=task, grad_wrt=["2.bias", "2.weight"], proj_dim=64)
    assert t.num_params_for_grad == 27
    assert t.grad_wrt == ["2.weight", "2.bias"]  # the model's order
    batch = [X[:4], Y[:4]]
    if isinstance(task, Custom):
        assert set(t.gradient_computer.compute_per_sample_grad(batch)) == {"2.weight", "2.bias"}
    else:
        units = t._tracer._prepared[0].tracer.units
        assert [unit.name for unit in units] == ["2"]
    assert all(parameter.requires_grad for parameter in t.model.parameters())
    train, _ = gradients(network(0), X, Y)
    x = np.array(t.saver.current_store["grads"])
    norms = np.linalg.norm(x, axis=1) ** 2 * 27 / 64
    truth = train[:, -27:].norm(dim=1).square().numpy()
    # All 64 numbers hold 27 values: collisions are few.
    assert np.corrcoef(norms, truth)[0, 1] > 0.8
    assert np.isfinite(scores).all()


def test_frozen_parameters_count_as_in_the_released_package(tmp_path):
    model = network(0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    t = TRAKer(
        model,
        "image_classification",
        N,
        tmp_path,
        device="cpu",
        proj_dim=20,
        logging_level=logging.ERROR,
    )
    t.load_checkpoint(model.state_dict(), 0)
    t.featurize((X, Y), num_samples=N)
    assert np.linalg.norm(t.saver.current_store["grads"], axis=1).min() > 0
    assert not any(parameter.requires_grad for parameter in model.parameters())


class InMemory(AbstractSaver):
    """As a saver for the released package is written: arrays that are assigned to."""

    def __init__(self, save_dir, metadata, train_set_size, proj_dim, **options):
        super().__init__(save_dir, metadata, **options)
        self.shape = (train_set_size, proj_dim)
        self.all = {}

    def register_model_id(self, model_id, _allow_featurizing_already_registered):
        self.model_ids[model_id] = {"is_featurized": 0, "is_finalized": 0}
        self.init_store(model_id)
        self.load_current_store(model_id)

    def init_store(self, model_id):
        n, k = self.shape
        self.all[model_id] = {
            "grads": np.zeros((n, k), np.float32),
            "features": np.zeros((n, k), np.float32),
            "out_to_loss": np.zeros((n, 1), np.float32),
            "is_featurized": np.zeros((n, 1), np.int32),
        }

    def serialize_current_model_id_metadata(self, already_exists=True):
        full = int(self.current_store["is_featurized"].all())
        self.model_ids[self.current_model_id]["is_featurized"] = full

    def init_experiment(self, exp_name, num_targets, model_id):
        self.experiments[exp_name] = {"num_targets": num_targets, "scores_finalized": 0}
        own = self.all[model_id]
        own.setdefault(f"{exp_name}_grads", np.zeros((num_targets, self.shape[1]), np.float32))
        own.setdefault(f"{exp_name}_scores", np.zeros((self.shape[0], num_targets), np.float32))
        self.load_current_store(model_id, exp_name)

    def load_current_store(self, model_id, exp_name=None, exp_num_targets=-1, mode="r+"):
        self.current_model_id, self.current_store = model_id, self.all[model_id]
        self.current_experiment_name = exp_name or self.current_experiment_name

    def save_scores(self, exp_name):
        self.experiments[exp_name]["scores_finalized"] = 1

    def del_grads(self, model_id, target=False):
        self.all[model_id]["grads"] = None


def test_a_saver_written_for_the_released_package(tmp_path):
    _, ours = run(tmp_path / "ours", (0, 1))
    t, theirs = run(tmp_path / "theirs", (0, 1), saver=InMemory)
    close(theirs, ours)
    assert t.saver.experiments["test"]["scores_finalized"] == 1


def test_a_task_that_gives_too_few_weights_is_refused(tmp_path):
    class Short(Custom):
        def get_out_to_loss_grad(self, model, weights, buffers, batch):
            return torch.ones(1, 1)

    with pytest.raises(ValueError, match="50 gradients and 1 weights"):
        run(tmp_path, task=Short())


def test_a_negative_ridge_is_refused(tmp_path):
    with pytest.raises(AttributionError, match="at least 0"):
        run(tmp_path, lambda_reg=-1.0)


def test_functional_gradients_are_those_of_autograd():
    model = network(0)
    computer = FunctionalGradientComputer(
        model, ImageClassificationModelOutput(), SIZE, torch.float32, "cpu"
    )
    grads = computer.compute_per_sample_grad([X, Y])
    flat = torch.cat([grad.flatten(1) for grad in grads.values()], 1)
    truth, weights = gradients(network(0), X, Y)
    assert torch.allclose(flat.double(), truth, atol=1e-4)
    assert torch.allclose(computer.compute_loss_grad([X, Y])[:, 0].double(), weights, atol=1e-5)
