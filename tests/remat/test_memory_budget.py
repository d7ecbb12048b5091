"""Training inside a budget: the same bits as plain training, or a clear exception."""

import copy
import functools
import threading

import pytest
import torch
from raises import raises
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradkeep as gk
from gradkeep.errors import BudgetError, RematError, StepChangedError
from gradkeep.remat.planned import _planner

memory_budget = functools.partial(gk.memory_budget, effort=0.05)
leaves_its_plan = pytest.mark.filterwarnings(
    "ignore:memory budget. a step kept everything:gradkeep.errors.BudgetWarning"
)


class Cnn(nn.Module):
    """Convolutions, batch normalization, in-place ReLU, dropout."""

    def __init__(self, depth=4, width=8, dropout=0.3):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width if i else 3, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Dropout(dropout),
            )
            for i in range(depth)
        )
        self.last = nn.Linear(width, 5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x.mean((2, 3)))


def images(seed, batch=6, side=16):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 3, side, side, generator=generator)
    return x, torch.randint(5, (batch,), generator=generator)


def classify(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def twins(make, seed=0):
    torch.manual_seed(seed)
    plain = make()
    return plain, copy.deepcopy(plain)


def state_of(model):
    gradients = [p.grad for p in model.parameters()]
    return [*model.parameters(), *gradients, *model.buffers(), torch.get_rng_state()]


def same(first, right):
    assert len(first) == len(right)
    for at, (a, b) in enumerate(zip(first, right, strict=True)):
        assert (a is None) == (b is None), at
        assert a is None or torch.equal(a, b), at


def trained(model, batches, *, loss=classify, around=None, step=None):
    """Train with Adam; the losses, and everything that training leaves behind."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    losses = []

    def one(batch):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.detach())

    step = step(one) if step else one
    for batch in batches:
        if around is None:
            step(batch)
        else:
            with around(batch):
                step(batch)
    return [*losses, *state_of(model)]


def epoch(model, batches, budget, **kwargs):
    with budget:
        return trained(model, batches, **kwargs)


FORMS = {
    "epoch": epoch,
    "steps": lambda m, b, budget, **k: trained(m, b, around=lambda x: budget.step(inputs=x), **k),
    "blocks": lambda m, b, budget, **k: trained(m, b, around=lambda x: budget, **k),
    "decorator": lambda m, b, budget, **k: trained(m, b, step=budget, **k),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ratio", [0.8, 0.6])
def test_every_form_trains_to_the_same_bits_inside_the_budget(form, ratio):
    plain, ours = twins(Cnn)
    batches = [images(seed) for seed in range(7)]
    budget = memory_budget(ratio)
    expected = trained(plain, batches)
    same(FORMS[form](ours, batches, budget), expected)
    done = budget.report()
    assert done.planned >= 3
    assert done.unplanned == done.undone == 0
    assert done.measured_peak <= done.budget
    assert done.measured_peak == pytest.approx(done.predicted_peak, rel=0.01)


def test_bytes_and_text_are_budgets_too():
    for budget in (10**9, "1GB", 1.0):
        model = Cnn(depth=2)
        around = memory_budget(budget)
        epoch(model, [images(s) for s in range(5)], around)
        assert around.report().planned >= 1
        assert around.explain().dropped == ()


@pytest.mark.parametrize("budget", [0, -1, 0.0, 1.5, True, None, "many", float("nan")])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(BudgetError):
        memory_budget(budget)


def test_a_budget_below_the_floor_names_the_floor():
    budget = memory_budget(0.05)
    model = Cnn()
    with raises(BudgetError, "budget.below_floor") as caught:
        epoch(model, [images(s) for s in range(6)], budget)
    floor = int(str(caught.value.expected).split("floor of ")[1].split()[0])
    assert budget.report().planned == 0
    # Costs are measured anew, so the search may go another way.
    wider = memory_budget(int(1.03 * floor))
    epoch(model, [images(s) for s in range(6)], wider)
    assert wider.report().planned >= 1
    assert wider.report().measured_peak <= 1.03 * floor


def test_a_model_with_nothing_to_drop_trains_or_names_its_peak():
    plain, ours = twins(lambda: nn.Linear(4, 3))
    batches = [(torch.randn(2, 4), torch.tensor([0, 1])) for _ in range(5)]
    expected = trained(plain, batches)
    same(epoch(ours, batches, memory_budget(1.0)), expected)
    with raises(BudgetError, "budget.below_floor"):
        epoch(nn.Linear(4, 3), batches, memory_budget(0.3))


def test_the_explanation_and_the_report_can_be_read():
    budget = memory_budget(0.6)
    with raises(RematError, "remat.no_plan"):
        budget.explain()
    epoch(Cnn(), [images(s) for s in range(5)], budget)
    explanation = budget.explain()
    assert explanation.floor <= explanation.predicted_peak <= explanation.budget < explanation.peak
    assert explanation.predicted_slowdown > 1
    assert (
        sum(value.bytes for value in explanation.dropped) >= explanation.peak - explanation.budget
    )
    assert any("layers" in value.layer for value in explanation.dropped)
    assert "frees" in str(explanation)
    assert "planned" in str(budget.report())


class Square(torch.autograd.Function):
    """A custom function that keeps one tensor in the proper way and one on the side."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.aside = x * 2
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        assert torch.equal(ctx.aside, 2 * x)
        return gradient * ctx.aside


class Sizes(nn.Module):
    """A multilayer perceptron whose forward pass is given from outside."""

    def __init__(self, forward, width=32):
        super().__init__()
        self.a, self.b = nn.Linear(16, width), nn.Linear(width, width)
        self.c, self.d = nn.Linear(width, width), nn.Linear(width, 5)
        self.norm = nn.BatchNorm1d(width)
        self.lstm = nn.LSTM(width, width, 2, dropout=0.2)
        self.cell = nn.LSTMCell(16, width)
        self.stash = []
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def rows(seed, batch=64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 16, generator=generator)
    return x, torch.randint(5, (batch,), generator=generator)


def custom_function(self, x):
    return self.d(Square.apply(self.b(Square.apply(torch.tanh(self.a(x))))).sigmoid())


def in_place_and_views(self, x):
    h = torch.relu(self.a(x))
    h = self.norm(h) * 1.0
    h[:, ::2] += 1.0
    h[:, :3].mul_(0.5)
    first_half, right = self.b(h.sigmoid()).chunk(2, 1)
    h = torch.cat([first_half.tanh(), right.relu()], 1)
    h = functional.relu_(self.c(h))
    return self.d(h.view(-1, 4, 8).transpose(1, 2).reshape(len(x), -1))


def nested_checkpoint(self, x):
    def inside(h):
        return torch.tanh(self.b(functional.dropout(h.relu(), 0.2)))

    h = torch.tanh(self.a(x))
    h = checkpoint(inside, h, use_reentrant=False)
    h = checkpoint(inside, h.sigmoid(), use_reentrant=True)
    return self.d(torch.tanh(self.c(h)))


def fused_lstm(self, x):
    steps = torch.tanh(self.a(x)).view(8, -1, 32)
    out, _ = self.lstm(steps)
    return self.d(torch.tanh(self.c(out)).reshape(-1, 32))


def cell_loop(self, x):
    h = c = x.new_zeros(len(x), 32)
    for _ in range(5):
        h, c = self.cell(x, (h, c))
    return self.d(h)


def stashing(self, x):
    self.stash.clear()
    h = torch.tanh(self.a(x))
    self.stash.append(h)
    h = torch.sigmoid(self.b(h))
    h.register_hook(lambda gradient: self.stash.append(gradient.clone()))
    return self.d(torch.tanh(self.c(h)).exp())


def complex_numbers(self, x):
    h = torch.tanh(self.a(x))
    turned = torch.polar(h.abs() + 0.1, h)
    return self.d(self.c(torch.tanh(turned.real) * torch.sigmoid(turned.imag)))


def fixed_mask(self, x):
    mask = torch.arange(32).remainder(3) == 0
    h = torch.tanh(self.a(x)).masked_fill(mask, 0.25)
    return self.d(torch.sigmoid(self.c(torch.where(mask, h.exp(), h))))


def grad_off_inside(self, x):
    with torch.no_grad():
        scale = torch.sigmoid(self.c(torch.tanh(self.a(x)))) * 2
    return self.d(torch.tanh(self.b(torch.tanh(self.a(x)) * scale)))


BODIES = [
    *(custom_function, in_place_and_views, nested_checkpoint, fused_lstm, cell_loop, stashing),
    *(complex_numbers, fixed_mask, grad_off_inside),
]


@pytest.mark.parametrize("form", ["epoch", "decorator"])
@pytest.mark.parametrize("body", BODIES)
def test_unusual_steps_train_to_the_same_bits(body, form):
    plain, ours = twins(lambda: Sizes(body))
    batches = [rows(seed) for seed in range(7)]
    expected = trained(plain, batches)
    probe = memory_budget(1.0, min_size=1)
    epoch(copy.deepcopy(ours), batches, probe)
    floor = int(1.03 * probe.explain().floor)
    budget = memory_budget(floor, min_size=1)
    same(FORMS[form](ours, batches, budget), expected)
    done = budget.report()
    assert done.planned >= 2, done.reasons
    assert done.measured_peak <= floor
    assert done.undone == 0


@leaves_its_plan
@pytest.mark.filterwarnings("ignore:memory budget. recorded steps:gradkeep.errors.BudgetWarning")
def test_accumulation_and_two_forwards_for_one_backward():
    def accumulate(model, budget=None):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for round_ in range(6):
            optimizer.zero_grad()
            for part in range(3):
                classify(model, images(10 * round_ + part)).backward()
            optimizer.step()
            optimizer.zero_grad()
            both = classify(model, images(round_)) + classify(model, images(round_ + 50))
            both.backward()
            optimizer.step()
        return state_of(model)

    plain, ours = twins(Cnn)
    expected = accumulate(plain)
    budget = memory_budget(0.7)
    with budget:
        same(accumulate(ours), expected)
    assert budget.report().planned >= 6
    assert budget.report().undone == 0


def test_an_explicit_step_may_hold_several_passes():
    def step(model, seed):
        for part in range(2):
            classify(model, images(seed + part)).backward()

    plain, ours = twins(Cnn)
    budget = memory_budget(0.7)
    for model, around in ((plain, None), (ours, budget)):
        torch.manual_seed(0)
        for seed in range(6):
            model.zero_grad()
            if around is None:
                step(model, seed)
            else:
                with around.step():
                    step(model, seed)
    same(state_of(ours)[:-1], state_of(plain)[:-1])
    assert budget.report().planned >= 2


def test_other_batch_sizes_get_plans_of_their_own():
    plain, ours = twins(Cnn)
    batches = [images(seed, batch=6 if seed % 3 else 4) for seed in range(18)]
    budget = memory_budget(0.7)
    same(epoch(ours, batches, budget), trained(plain, batches))
    done = budget.report()
    assert done.recorded <= 8
    assert done.planned >= 10
    assert len(budget._planner.plans) == 2


@leaves_its_plan
def test_training_and_evaluating_are_told_apart():
    plain, ours = twins(Cnn)

    def go(model):
        torch.manual_seed(1)
        for seed in range(10):
            model.train(seed % 2 == 0)
            model.zero_grad()
            classify(model, images(seed)).backward()
        return state_of(model)

    expected = go(plain)
    with memory_budget(0.7):
        same(go(ours), expected)


def test_two_models_and_two_optimizers_share_a_budget():
    def go(first, second):
        torch.manual_seed(0)
        optimizers = [torch.optim.Adam(model.parameters()) for model in (first, second)]
        for seed in range(7):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad()
                classify(model, images(seed)).backward()
                optimizer.step()
        return [*state_of(first), *state_of(second)]

    plain, ours = twins(lambda: nn.ModuleList([Cnn(), Cnn(depth=3)]))
    expected = go(*plain)
    budget = memory_budget(0.7)
    with budget:
        same(go(*ours), expected)
    assert budget.report().planned >= 6


@leaves_its_plan
def test_keeping_the_graph_is_exact_when_recorded_and_when_new():
    for always in (True, False):
        plain, ours = twins(Cnn)

        def go(model, always=always):
            torch.manual_seed(0)
            for seed in range(7):
                model.zero_grad()
                loss = classify(model, images(seed))
                if always or seed == 5:
                    loss.backward(retain_graph=True)
                loss.backward()
            return state_of(model)

        expected = go(plain)
        budget = memory_budget(0.7)
        with budget:
            same(go(ours), expected)
        assert budget.report().undone == 0


@leaves_its_plan
def test_double_backward_is_exact_when_recorded_and_when_new():
    for always in (True, False):
        plain, ours = twins(lambda: Sizes(lambda self, x: self.d(self.b(self.a(x).tanh()).exp())))

        def go(model, always=always):
            torch.manual_seed(0)
            for seed in range(7):
                model.zero_grad()
                x, y = rows(seed)
                x.requires_grad_()
                loss = functional.cross_entropy(model(x), y)
                if always or seed == 5:
                    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                    loss = loss + slope.square().sum()
                loss.backward()
            return [p.grad for p in model.parameters()]

        expected = go(plain)
        budget = memory_budget(1.0 if always else 0.95, min_size=1)
        with budget:
            same(go(ours), expected)
        assert budget.report().undone == 0


def test_pinned_tensors_are_not_dropped():
    def body(self, x):
        h = torch.tanh(self.a(x))
        if self.stash:
            self.stash[0].pin(h)
        return self.d(torch.tanh(self.b(h)))

    def dropped(model, budget):
        epoch(model, [rows(s) for s in range(5)], budget)
        return [value.layer for value in budget.explain().dropped]

    free, pinned = memory_budget(0.95, min_size=1), memory_budget(1.0, min_size=1)
    model = Sizes(body)
    assert dropped(model, free)
    model.stash.append(pinned)
    epoch(model, [rows(s) for s in range(5)], pinned)
    layers = [c.value for c in pinned._planner.last.compiled.problem.candidates]
    others = [c.value for c in free._planner.last.compiled.problem.candidates]
    assert len(layers) == len(others) - 1


def test_hooks_that_stash_get_exact_tensors_back_and_hold_no_bytes():
    def per_sample(model, budget):
        """Squared gradient norms per sample, as capture makes them: from inputs and suffixes."""
        results = []

        def saw(module, args, output):
            stashed = budget.stash(args[0]) if budget else args[0].detach()

            def arrived(suffix):
                x = stashed.get() if budget else stashed
                results.append((suffix.square().sum(1) * x.square().sum(1)).clone())

            output.register_hook(arrived)

        linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
        handles = [part.register_forward_hook(saw) for part in linear]
        for seed in range(7):
            with budget.step() if budget else torch.enable_grad():
                x, y = rows(seed, batch=512)
                functional.cross_entropy(model(x), y).backward()
            model.zero_grad()
        for handle in handles:
            handle.remove()
        return results

    def body(self, x):
        return self.d(torch.tanh(self.c(torch.sigmoid(self.b(torch.tanh(self.a(x)))))))

    plain, ours = twins(lambda: Sizes(body))
    budget = memory_budget(0.85, min_size=1)
    same(per_sample(ours, budget), per_sample(plain, None))
    assert budget.report().planned >= 3
    assert budget.report().measured_peak <= budget.report().budget
    assert budget.explain().dropped


def test_a_tensor_modified_after_it_was_saved_is_an_error_as_in_torch():
    def body(self, x):
        h = torch.exp(self.a(x))
        out = self.d(torch.tanh(self.b(h)))
        if self.stash:
            h.add_(1)
        return out

    model = Sizes(body)
    budget = memory_budget(1.0, min_size=1)
    epoch(model, [rows(s) for s in range(5)], budget)
    model.stash.append(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"), budget:
        trained(model, [rows(9)])
    fresh = memory_budget(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace"), fresh:
        trained(model, [rows(9)])


def test_parameters_changed_between_forward_and_backward_are_noticed():
    _plain, ours = twins(Cnn)
    budget = memory_budget(0.6)
    epoch(ours, [images(s) for s in range(6)], budget)
    with budget:
        loss = classify(ours, images(9))
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.add_(1)
        with pytest.raises((RuntimeError, StepChangedError)):
            loss.backward()


@leaves_its_plan
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("when", [0, 1, 5])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_in_mid_step_leaves_nothing_behind(where, when, kind):
    plain, ours = twins(Cnn)

    def boom(*_):
        raise kind("boom")

    def go(model, budget=None):
        torch.manual_seed(0)
        for seed in range(8):
            model.zero_grad()
            with budget.step() if budget else torch.enable_grad():
                if seed == when:
                    handle = (
                        model.layers[2].register_forward_hook(boom)
                        if where == "forward"
                        else model.layers[2].register_full_backward_hook(boom)
                    )
                    with pytest.raises(kind, match="boom"):
                        classify(model, images(seed)).backward()
                    handle.remove()
                    model.zero_grad()
                else:
                    classify(model, images(seed)).backward()
        return state_of(model)

    same(go(ours, memory_budget(0.7)), go(plain))
    budget = memory_budget(0.7)
    handle = ours.layers[1].register_forward_hook(boom)
    with pytest.raises(kind), budget.step():
        classify(ours, images(0)).backward()
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_budgets_cannot_be_nested_but_the_outer_one_goes_on():
    outer, inner = memory_budget(0.8), memory_budget(0.8)
    model = Cnn(depth=2)
    with outer:
        with raises(BudgetError, "budget.nested", fix="nested"), inner:
            pass
        with raises(BudgetError, "budget.nested", fix="nested"), outer.step():
            pass
        trained(model, [images(s) for s in range(5)])
    assert outer.report().planned >= 1


def test_other_threads_train_without_a_budget_and_may_have_their_own():
    plain, ours = twins(Cnn)
    expected = trained(plain, [images(s) for s in range(6)])
    budget, results = memory_budget(0.7), []

    def elsewhere():
        other = copy.deepcopy(start)
        own = memory_budget(0.7)
        with own:
            for seed in range(6):
                classify(other, images(seed)).backward()
        results.append(own.report().planned)

    start = copy.deepcopy(ours)
    with budget:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        same(trained(ours, [images(s) for s in range(6)]), expected)
    assert results[0] >= 1
    assert budget.report().planned >= 2


def test_transforms_of_functions_are_refused_with_a_reason():
    model = Cnn(depth=2)

    def inside():
        weights = dict(model.named_parameters())
        x = images(0)[0]
        return torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(weights)

    budget = memory_budget(0.8)
    with raises(RematError, "remat.func_transform"), budget:
        inside()
    epoch(model, [images(s) for s in range(5)], budget)
    with raises(RematError, "remat.func_transform"), budget.step():
        inside()


def test_a_compiled_module_trains_to_the_same_bits():
    plain, ours = twins(lambda: Sizes(lambda self, x: self.d(torch.tanh(self.b(self.a(x).relu())))))
    fast = torch.compile(ours, backend="eager")
    batches = [rows(s) for s in range(6)]
    same(epoch(fast, batches, memory_budget(0.95, min_size=1)), trained(plain, batches))


@pytest.mark.parametrize(("form", "recordings"), [("steps", 2), ("blocks", 2), ("epoch", 2)])
def test_saved_plans_are_used_after_two_recordings_of_the_step(
    tmp_path, monkeypatch, form, recordings
):
    plain, ours = twins(Cnn)
    batches = [images(s) for s in range(7)]
    first = memory_budget(0.6)
    FORMS[form](copy.deepcopy(ours), batches, first)
    first.save(tmp_path / "plans.json")
    first.save(tmp_path / "again.json")
    assert (tmp_path / "plans.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    assert any(first._planner.last.compiled.states)
    monkeypatch.setattr(_planner, "search_plan", None)  # nothing is planned anew
    second = memory_budget(0.6).load(tmp_path / "plans.json")
    same(FORMS[form](ours, batches, second), trained(plain, batches))
    done = second.report()
    assert (done.recorded, done.planned, done.unplanned) == (recordings, 7 - recordings, 0)
    assert second._planner.last.compiled.states == first._planner.last.compiled.states


def test_a_saved_plan_that_does_not_fit_the_budget_is_not_used(tmp_path):
    plain, ours = twins(Cnn)
    batches = [images(s) for s in range(7)]
    wide = memory_budget(0.9)
    FORMS["steps"](copy.deepcopy(ours), batches, wide)
    wide.save(tmp_path / "plans.json")
    tight = memory_budget(0.6).load(tmp_path / "plans.json")
    same(FORMS["steps"](ours, batches, tight), trained(plain, batches))
    done = tight.report()
    assert done.measured_peak <= done.budget < wide.report().measured_peak


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"format": 99, "plans": []}', '{"format": 1}']
)
def test_what_is_no_file_of_plans_is_refused(tmp_path, content):
    path = tmp_path / "plans.json"
    path.write_text(content)
    with raises(RematError, "remat.plans_invalid") as caught:
        memory_budget(0.5).load(path)
    assert caught.value.path == str(path)
    with raises(RematError, "remat.plans_unreadable") as caught:
        memory_budget(0.5).load(tmp_path / "nothing.json")
    assert caught.value.path == str(tmp_path / "nothing.json")


def test_the_same_trace_gives_the_same_plan():
    from gradkeep.remat.planned._search import search_plan

    budget = memory_budget(0.6)
    epoch(Cnn(), [images(s) for s in range(5)], budget)
    problem = budget._planner.last.compiled.problem
    results = [
        search_plan(problem, budget._planner.last.budget, seed=3, effort=0.1).states
        for _ in range(2)
    ]
    assert results[0] == results[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu_is_exact_too():
    plain, ours = twins(lambda: Cnn().cuda())
    batches = [tuple(t.cuda() for t in images(s)) for s in range(7)]
    budget = memory_budget(0.7)
    same(epoch(ours, batches, budget), trained(plain, batches))
    assert budget.report().cuda_peak > 0
