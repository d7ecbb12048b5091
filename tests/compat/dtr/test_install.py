"""The prototype's scripts find its names on torch, train to the same bits, and leave nothing behind."""

import gc
import random
import subprocess
import sys
import time

import pytest
import torch
from raises import raises
from torch import nn

from gradkeep.compat import dtr
from gradkeep.errors import BudgetError, RematError
from gradkeep.remat import read_log, simulate

NAMES = (
    *("annotate_log", "base_compute_time", "clear_checkpointpool", "compute_time", "cost_time"),
    *("loop_time", "new_log", "remat_compute_time", "reset_profile", "search_time"),
    *("set_memory_budget", "toggle_ignore_small_tensors", "toggle_log", "toggle_profile"),
    *("toggle_sampling", "unset_memory_budget"),
)
METHODS = (
    *("checkpoint", "decheckpoint", "is_checkpoint", "pin", "try_checkpoint", "uncheckpoint"),
)


@pytest.fixture(autouse=True)
def nothing_in_force():
    yield
    dtr.uninstall()
    dtr.toggle_sampling(False)
    dtr.toggle_ignore_small_tensors(False)
    dtr.toggle_profile(True)
    dtr.reset_profile()


def names_on_torch():
    return [*(hasattr(torch, n) for n in NAMES), *(hasattr(torch.Tensor, n) for n in METHODS)]


def test_names_come_and_go():
    cuda = torch.Tensor.cuda, nn.Module.cuda, torch.cuda.Event, torch.cuda.synchronize
    assert not any(names_on_torch())
    dtr.install()
    assert all(names_on_torch())
    with raises(RematError, "compat.installed", fix="uninstall"):
        dtr.install()
    dtr.uninstall()
    assert not any(names_on_torch())
    with dtr.install():
        assert all(names_on_torch())
        torch.set_memory_budget(1e6)
    assert not any(names_on_torch())
    assert (
        torch.Tensor.cuda,
        nn.Module.cuda,
        torch.cuda.Event,
        torch.cuda.synchronize,
    ) == cuda
    dtr.uninstall()  # twice does no harm


def test_the_signatures_are_the_prototypes():
    with dtr.install():
        x = torch.ones(3)
        assert x.checkpoint().is_checkpoint()
        assert x.try_checkpoint() is x
        assert x.uncheckpoint() is x
        assert not x.is_checkpoint()
        with raises(RematError, "remat.not_a_checkpoint", fix="decheckpoint"):
            x.uncheckpoint()
        assert x.decheckpoint() is x
        assert x.pin() is None
        torch.set_memory_budget(1e6)
        torch.toggle_sampling(True)
        torch.toggle_ignore_small_tensors(True)
        torch.toggle_profile(True)
        torch.reset_profile()
        y = x * 2 + 1
        assert y.is_checkpoint()
        assert torch.compute_time() == torch.base_compute_time() + torch.remat_compute_time() > 0
        assert torch.loop_time() == torch.search_time()
        torch.clear_checkpointpool()
        torch.set_memory_budget(10**6)
        torch.unset_memory_budget()
        assert y.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("budget", [0, -5, 0.5, float("nan"), "much", True])
def test_budgets_that_are_none_are_refused_by_name(budget):
    with dtr.install(), pytest.raises(BudgetError):
        torch.set_memory_budget(budget)


def test_another_torch_of_that_name_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "checkpoint", lambda self: self, raising=False)
    with raises(RematError, "compat.names_taken") as caught:
        dtr.install()
    assert caught.value.found == "checkpoint"
    assert not hasattr(torch, "set_memory_budget")


# The trial of the prototype: the way in which its scripts prepare, run and measure a model.


def prepared(batch_size, *, use_dtr):
    def produce_model(extra_params=None):
        torch.manual_seed(1)
        depth = extra_params.get("depth", 6)
        blocks = [
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
            for _ in range(depth)
        ]
        model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * 64, 5))
        model.cuda()
        model.train()
        if use_dtr:
            model._apply(lambda v: v.detach().checkpoint())
        return [model]

    def gen_input(i, extra_params=None):
        data = torch.randn(batch_size, 4, 8, 8).cuda()
        target = torch.randn(batch_size).type("torch.LongTensor").fill_(1).cuda()
        return data, target

    def run_model(criterion, model, data, target, optimizer=None):
        if use_dtr:
            data = data.checkpoint()
            target = target.checkpoint()
        loss = criterion(model(data), target)
        if use_dtr:
            torch.annotate_log("BACKWARD")
        loss.backward()
        if use_dtr:
            data = data.decheckpoint()
            loss = loss.decheckpoint()
            target = target.decheckpoint()

    return produce_model, gen_input, run_model


def measured(model, run_model, criterion, inp, *, use_dtr, use_profiling):
    torch.cuda.reset_max_memory_allocated()
    input_mem = torch.cuda.max_memory_allocated()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start_time = time.time()
    if use_dtr:
        torch.reset_profile()
    start.record()
    run_model(criterion, *model, *inp)
    end.record()
    torch.cuda.synchronize()
    result = {"time": time.time() - start_time, "gpu_time": start.elapsed_time(end)}
    if use_dtr:
        result["cuda_time"] = torch.compute_time()
    if use_profiling:
        result["base"], result["remat"] = torch.base_compute_time(), torch.remat_compute_time()
        result["search"], result["cost"] = torch.search_time(), torch.cost_time()
        torch.reset_profile()
    result["memory"] = torch.cuda.max_memory_allocated() - input_mem
    if use_dtr:
        torch.toggle_log(False)
    return result


def trial(params, *, use_dtr, save_log=False, reps=2):
    torch.manual_seed(0)
    random.seed(0)
    if use_dtr:
        memory_budget = int(params["memory_budget"])
        if memory_budget > 0:
            torch.set_memory_budget(memory_budget)
        torch.toggle_ignore_small_tensors(params["ignore_small_tensors"])
        torch.toggle_sampling(params["use_sampling"])
        torch.toggle_log(False)
        torch.toggle_profile(True)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        produce, gen_input, run_model = prepared(params["batch_size"], use_dtr=use_dtr)
        criterion = nn.CrossEntropyLoss().cuda()
        inp = gen_input(0, {})
        results = []
        for j in range(reps):
            gc.collect()
            if save_log and j == reps - 1:
                torch.toggle_log(True)
                torch.annotate_log("START")
            model = produce(extra_params={"depth": 6})
            results.append(
                measured(model, run_model, criterion, inp, use_dtr=use_dtr, use_profiling=use_dtr)
            )
    return [p.grad.clone() for p in model[0].parameters()], results


PARAMS = {"batch_size": 8, "use_sampling": True, "ignore_small_tensors": True}


def test_the_trial_of_the_prototype_runs_as_it_is_and_gives_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with dtr.install():
        plain, _ = trial({**PARAMS, "memory_budget": -1}, use_dtr=False)
        unlimited, _ = trial({**PARAMS, "memory_budget": -1}, use_dtr=True)
        within, log = trial({**PARAMS, "memory_budget": 9e4}, use_dtr=True, save_log=True)
    for actual in (unlimited, within):
        assert all(torch.equal(a, b) for a, b in zip(plain, actual, strict=True))
    assert log[0]["remat"] > 0
    assert log[0]["cuda_time"] == log[0]["base"] + log[0]["remat"]
    assert log[0]["memory"] > 0
    assert [path.name for path in tmp_path.glob("*.log")] == ["default.log"]
    program = read_log("default.log")
    assert simulate(program, budget=10**9).status == "ok"
    assert sum(op.name == "convolution" for op in program.ops) == 6


def test_a_new_log_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with dtr.install():
        torch.new_log("mine")
        torch.toggle_log(True)
        torch.ones(4) * 2
        torch.toggle_log(False)
        torch.new_log("default")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.log"]


def test_toggles_count_for_the_budget_in_force():
    dtr.set_memory_budget("60kB")
    sample = dtr._prototype.STATE.sample
    pool = dict.fromkeys(type("S", (), {"size": 4})() for _ in range(400))
    assert sample.of(pool) is pool
    dtr.toggle_sampling(True)
    assert len(sample.of(pool)) < 100
    dtr.toggle_sampling(False)


def test_installing_is_the_only_thing_that_needs_torch():
    code = "import sys; from gradkeep.compat import dtr; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
