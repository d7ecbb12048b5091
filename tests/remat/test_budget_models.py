"""Steps as people write them: lazy complex views, cells in loops, slices, modules made per call, AMP, compile."""

import contextlib
import copy
import functools
import threading

import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.errors import BudgetError, BudgetWarning, RematError, StepChangedError

memory_budget = functools.partial(gk.memory_budget, effort=0.05, min_size=1)
may_say_more = pytest.mark.filterwarnings("ignore:memory budget:gradkeep.errors.BudgetWarning")


def mlp(depth=6, width=32):
    return nn.Sequential(
        *(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU()))
    )


def dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


def trained(make, budget=None, *, steps=8, explicit=False):
    """Loss and gradients of each step, bits and all."""
    torch.manual_seed(0)
    parameters, step = make()
    results = []
    whole = contextlib.nullcontext() if budget is None or explicit else budget
    with whole:
        for number in range(steps):
            for parameter in parameters:
                parameter.grad = None
            torch.manual_seed(number)
            with budget.step() if explicit and budget is not None else contextlib.nullcontext():
                loss = step(number)
                loss.backward()
            results.append((loss.item(), [dense(p.grad).clone() for p in parameters]))
            del loss
            with torch.no_grad():
                for parameter in parameters:
                    parameter.sub_(1e-3 * dense(parameter.grad))
    return results


def same(first, right):
    for number, (ours, theirs) in enumerate(zip(first, right, strict=True)):
        assert ours[0] == theirs[0], f"the loss of step {number}"
        for a, b in zip(ours[1], theirs[1], strict=True):
            assert torch.equal(
                torch.view_as_real(a) if a.is_complex() else a,
                torch.view_as_real(b) if b.is_complex() else b,
            ), number


def model_with(body, rows=64):
    """A step function that calls `body(model, x, number)`."""

    def make():
        model, x = mlp(), torch.randn(rows, 32)
        return list(model.parameters()), lambda number: body(model, x, number).square().sum()

    return make


def lazy_conjugates(model, x, number):
    h = model(x)
    z = torch.complex(h, h.sin())
    z = torch.fft.fft(z * z.conj() + z.imag * z).conj()
    return model((z.imag * z.real).sigmoid() + (z.conj() * z).real.tanh())


def negative_views(model, x, number):
    z = torch.view_as_complex(model(x).view(-1, 16, 2)).conj()
    return model(torch.cat((z.imag.tanh() * z.imag, z.real.sin() * z.real), 1))


def rotary(model, x, number):
    turns = torch.polar(torch.ones(16), torch.arange(16.0))
    z = torch.view_as_complex(model(x).view(-1, 16, 2)) * turns
    return model(torch.view_as_real(z).flatten(1))


def conjugates_inside(model, x, number):
    h = model(x)
    # Without its gradient, which torch computes otherwise while a mode watches.
    z = torch.linalg.pinv(torch.complex(h, h.sin()).detach()).abs()
    return model((h.sin() * z.T.tanh()).sigmoid())


def made_per_call(model, x, number):
    return model[4:](model[:4](x))


def held_slices(model, x, number):
    first, second = model[:6], model[6:]
    return second(first(x)) + first(x)


@may_say_more
@pytest.mark.parametrize(
    "body",
    [lazy_conjugates, negative_views, rotary, conjugates_inside, made_per_call, held_slices],
)
@pytest.mark.parametrize("mode", ["auto", "online"])
@pytest.mark.parametrize("ratio", [0.9, 0.7])
def test_lazy_views_and_passing_modules_train_to_the_same_bits(body, mode, ratio):
    make = model_with(body)
    budget = memory_budget(ratio, mode=mode)
    same(trained(make, budget), trained(make))
    done = budget.report()
    if mode == "auto":
        assert (done.recorded, done.planned) == (3, 5)
        assert done.measured_peak <= done.budget
        assert budget.explain().dropped
    else:
        assert done.online == 8


def cells(kind, count):
    def make():
        cell, x = kind(32, 32), torch.randn(10, 32, 32)

        def step(number):
            state = tuple(torch.zeros(32, 32) for _ in range(count))
            for at in range(10):
                out = cell(x[at], state[0] if count == 1 else state)
                state = (out,) if count == 1 else out
            return state[0].square().sum()

        return list(cell.parameters()), step

    return make


@pytest.mark.parametrize(("kind", "count"), [(nn.GRUCell, 1), (nn.LSTMCell, 2), (nn.RNNCell, 1)])
@pytest.mark.parametrize("ratio", [0.95, 0.9])
def test_cells_in_a_loop_train_to_the_same_bits(kind, count, ratio):
    make = cells(kind, count)
    budget = memory_budget(ratio)
    same(trained(make, budget), trained(make))
    assert budget.report().planned == 5
    assert budget.explain().dropped


def batches_of(cut):
    def make():
        model, data = mlp(), torch.randn(2000, 32)
        return list(model.parameters()), lambda number: cut(model, data, number).square().sum()

    return make


def one_slice(model, data, number):
    return model(data[number * 128 : number * 128 + 128])


def shifted(model, data, number):
    flat = data.view(-1)
    start = 1000 * number
    x, y = flat[start : start + 4096], flat[start + 1 : start + 4097]
    return model(x.view(128, 32)) * y.view(128, 32)


def two_places(model, data, number):
    a, b = data[number * 100 :][:128], data[(7 * number % 5) * 200 + 900 :][:128]
    return model(a * b) * b + model(b).tanh() * a


def stacked(model, data, number):
    places = torch.randint(0, 1900, (4,)).tolist()
    return model(torch.stack([data[p : p + 32] for p in places]).flatten(0, 1))


@pytest.mark.parametrize("cut", [one_slice, shifted, two_places, stacked])
def test_batches_that_are_slices_have_plans(cut):
    make = batches_of(cut)
    budget = memory_budget(0.8)
    same(trained(make, budget), trained(make))
    done = budget.report()
    assert (done.recorded, done.planned, done.unplanned) == (3, 5, 0)
    assert done.measured_peak <= done.budget
    assert budget.explain().dropped


def test_inputs_given_as_slices_are_read_again():
    torch.manual_seed(0)
    data = torch.randn(2000, 32)
    plain = mlp()
    ours = copy.deepcopy(plain)
    budget = memory_budget(0.7)

    def step(model, x):
        # Nothing saves x itself: it can only be read from what was handed over.
        model((x * 2.0).sin()).square().sum().backward()

    for number in range(7):
        x = data[number * 128 : number * 128 + 128]
        step(plain, x)
        with budget.step(inputs=(x,)):
            step(ours, x)
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), number
    assert budget.report().planned >= 3


def test_sparse_gradients():
    def make():
        table, model = nn.Embedding(50, 32, sparse=True), mlp()
        ids = torch.randint(0, 50, (256,))
        return (
            [table.weight, *model.parameters()],
            lambda number: model(table(ids.roll(number))).square().sum(),
        )

    budget = memory_budget(0.7)
    same(trained(make, budget), trained(make))
    assert budget.report().planned == 5


def hidden_change(at, later):
    """A change of one element that the autograd graph does not show; another one from step 6 on."""

    def make():
        model, x = mlp(width=64), torch.randn(512, 64)

        def step(number):
            h = x
            for block in range(6):
                h = model[2 * block](h)
                if block == at:
                    with torch.no_grad():
                        h[100, 20] += 1.0 if number < 6 else later
                h = model[2 * block + 1](h)
            return h.square().sum()

        return list(model.parameters()), step

    return make


@pytest.mark.parametrize("at", range(6))
def test_a_hidden_change_of_one_element_never_gives_a_wrong_gradient(at):
    make = hidden_change(at, later=5.0)
    expected = trained(make)
    budget = memory_budget(0.5, min_size=None)
    try:
        same(trained(make, budget), expected)
    except StepChangedError:
        assert budget.report().undone == 1


def test_a_hidden_change_is_found_where_the_changed_tensor_is_made_again():
    results = []
    for at in range(6):
        budget = memory_budget(0.5, min_size=None)
        try:
            trained(hidden_change(at, later=5.0), budget)
        except StepChangedError:
            results.append(at)
    assert results, "this test needs a plan that makes the changed tensor again"


def test_only_a_full_check_sees_all(monkeypatch):
    from gradkeep.remat._rerun import ContentHash

    assert memory_budget(0.6, check="sampled")._planner.settings.check == "sampled"
    with pytest.raises(BudgetError, match="check must be"):
        memory_budget(0.6, check="some")
    values = []
    real = ContentHash.of
    monkeypatch.setattr(ContentHash, "of", lambda self, base: values.append(1) or real(self, base))
    make = model_with(made_per_call)
    same(trained(make, memory_budget(0.7, check="sampled")), trained(make))
    assert not values
    same(trained(make, memory_budget(0.7)), trained(make))
    assert values


# Saying it


def test_a_step_that_keeps_everything_warns_with_reason_and_remedy():
    def body(model, x, number):
        h = model(x)
        return model(h) if number == 6 else model(h.sin())

    budget = memory_budget(0.8)
    with pytest.warns(BudgetWarning, match=r"kept everything.*saved tensor.*must do the same"):
        trained(model_with(body), budget)


def times(h, number):
    """As often as its number says: no two steps are alike."""
    for _ in range(number):
        h = h.sin()
    return h


@may_say_more
def test_a_step_without_a_plan_says_what_differs():
    def body(model, x, number):
        return model(times(model(x), number))

    budget = memory_budget(0.8, mode="planned")
    with pytest.warns(BudgetWarning, match="no plan"):
        trained(model_with(body), budget, steps=24)
    fresh = memory_budget(0.8)
    trained(model_with(body), fresh, steps=3)
    with raises(RematError, "remat.no_plan") as caught:
        fresh.explain()
    assert "one step runs sin in the step giving [64, 32], another addmm in 0" in caught.value.found


@may_say_more
def test_falling_back_to_the_online_runtime_warns():
    def body(model, x, number):
        return model(times(model(x), number))

    budget = memory_budget(0.9)
    with pytest.warns(BudgetWarning, match="evicted online, which is experimental"):
        trained(model_with(body), budget, steps=24)
    assert budget.report().online


def test_memory_that_grows_outside_of_the_step_warns():
    model, x = mlp(), torch.randn(128, 32)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=4, history_size=50, tolerance_grad=0, tolerance_change=0
    )

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    budget = memory_budget(0.9)
    with budget, pytest.warns(BudgetWarning, match=r"over the budget.*histories of an optimizer"):
        all(optimizer.step(closure) is not None for _ in range(8))
    assert budget.report().measured_peak > budget.report().budget


def test_nothing_is_said_where_the_budget_holds():
    make = model_with(made_per_call)
    budget = memory_budget(0.8)
    trained(make, budget, steps=40)  # warnings are errors here; step 36 was measured again
    assert budget.report().planned == 37


# Threads, compilers, mixed precision


def test_a_budget_left_in_another_thread_does_not_wedge_the_first():
    first = memory_budget(0.8)
    first.__enter__()
    model, x = mlp(), torch.randn(64, 32)
    model(x).sum().backward()
    errors = []

    def leave():
        try:
            first.__exit__(None, None, None)
        except BudgetError as error:
            errors.append(error)

    other = threading.Thread(target=leave)
    other.start()
    other.join()
    assert errors[0].code == "budget.wrong_thread"
    model(x).sum().backward()  # whatever hooks are left do nothing
    make = model_with(made_per_call)
    second = memory_budget(0.8)
    same(trained(make, second), trained(make))
    assert second.report().planned == 5


def compiled(backend):
    def make():
        import torch._dynamo

        torch._dynamo.reset()
        model, x = mlp(), torch.randn(256, 32)
        fast = torch.compile(model, backend=backend) if backend else model
        return list(model.parameters()), lambda number: fast(x).square().sum()

    return make


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_to_the_bits_of_the_plain_one(backend, explicit):
    budget = memory_budget(0.7)
    ours = trained(compiled(backend), budget, explicit=explicit)
    same(ours, trained(compiled(None)))
    assert budget.report().planned == 5


@pytest.mark.parametrize("dtype", [torch.float16])
def test_mixed_precision_trains_to_the_same_bits(dtype):
    def body(model, x, number):
        with torch.autocast("cpu", dtype=dtype):
            return model(x).float()

    make = model_with(body, rows=256)
    budget = memory_budget(0.8)
    same(trained(make, budget), trained(make))
    assert budget.report().planned == 5
    assert budget.explain().dropped


@may_say_more
def test_two_kinds_of_steps_that_take_turns_are_both_planned():
    def body(model, x, number):
        return model(x) if number % 2 else model(model(x).sin())

    make = model_with(body)
    budget = memory_budget(0.9)
    same(trained(make, budget, steps=20), trained(make, steps=20))
    assert budget.report().planned >= 6
    assert not budget.report().online
