"""The parts of planned training: recording, planning and running agree with plain training."""

import random

import pytest
import torch

from gradkeep.compat.dtr.zoo import build
from gradkeep.remat._tensors import exclude_mode_from_compiler
from gradkeep.remat.planned._evaluate import PlanEvaluator, Treatment, build_problem
from gradkeep.remat.planned._planned_step import PlannedStep, unpack
from gradkeep.remat.planned._programs import compile_plan
from gradkeep.remat.planned._search import search_plan
from gradkeep.remat.planned._session import RecordingMode
from gradkeep.remat.planned._step_recorder import StepRecorder
from gradkeep.remat.planned._trace import merge_traces

hooks = torch.autograd.graph.saved_tensors_hooks


def recorded(step, *, cloning, hooked=None):
    recording, watch = StepRecorder(cloning=cloning), exclude_mode_from_compiler(RecordingMode)()
    with hooks((hooked or recording).pack, unpack):
        watch.start(recording)
        step()
        watch.stop()
    return recording.finish()


def problem_of_work(work):
    recorded(work.step, cloning=False)
    trace = merge_traces(recorded(work.step, cloning=False), recorded(work.step, cloning=True))
    return build_problem(trace, min_size=1)


def bytes_with_the_same_bits(work, problem, states):
    evaluation = PlanEvaluator(problem)(states)
    plan = compile_plan(problem, tuple(states), evaluation)
    state = {key: value.clone() for key, value in work.model.state_dict().items()}

    def outcome(step):
        work.model.load_state_dict(state)
        torch.manual_seed(3)
        step()
        gradients = [parameter.grad.clone() for parameter in work.model.parameters()]
        buffers = [buffer.clone() for buffer in work.model.buffers()]
        return [*gradients, *buffers, torch.get_rng_state()]

    def planned():
        run = PlannedStep(plan)
        with hooks(run.pack, unpack):
            work.step()
        assert run.changed is None

    for plain, ours in zip(outcome(work.step), outcome(planned), strict=True):
        assert torch.equal(plain, ours)
    measured = recorded(work.step, cloning=False, hooked=PlannedStep(plan)).peak
    return measured, evaluation.peak


MODELS = ["resnet20", "unet", "transformer", "lstm_encoder"]


@pytest.mark.parametrize("name", MODELS)
def test_a_planned_step_gives_the_same_bits_in_the_predicted_bytes(name):
    work = build(name)
    problem = problem_of_work(work)
    plan = search_plan(problem, int(0.8 * problem.peak), effort=0.05)
    assert plan.fits
    assert plan.evaluation.peak < 0.8 * problem.peak
    measured, predicted = bytes_with_the_same_bits(work, problem, plan.states)
    assert measured == predicted == plan.evaluation.peak


@pytest.mark.parametrize("name", MODELS)
def test_whatever_is_done_to_each_value_the_bits_are_the_same_and_the_bytes_as_promised(name):
    work = build(name)
    problem = problem_of_work(work)
    draw = random.Random(name)
    count = len(problem.candidates)
    plans = [[Treatment.LATE] * count, *(draw.choices([*Treatment], k=count) for _ in range(3))]
    for states in plans:
        measured, predicted = bytes_with_the_same_bits(work, problem, [*map(int, states)])
        # Never more than promised; plans that nobody would make may take a little less.
        assert 0.99 * predicted <= measured <= predicted
