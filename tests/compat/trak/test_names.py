"""Every public name and signature of the released package is here, or listed with its reason."""

import importlib
import inspect
import pkgutil

import pytest
import torch

from gradkeep.compat.trak import projectors, utils

DIFFERENT = {
    # Nothing calls these: the released classes derived from them take other arguments.
    "modelout_functions.AbstractModelOutput.get_output": "takes what tasks are called with",
    "modelout_functions.AbstractModelOutput.get_out_to_loss_grad": "the same",
    "savers.AbstractSaver.init_experiment": "takes what savers are called with",
    # What was kept in the class belongs to the task.
    "modelout_functions.CLIPModelOutput.get_embeddings": "called on the task, not on the class",
    "modelout_functions.CLIPModelOutput.get_output": "called on the task, not on the class",
}
DEFAULTS = {
    "projectors.NoOpProjector.__init__ device": "the CPU, where there may be no other device",
    "utils.vectorize device": "where the gradients are",
    "traker.TRAKer.__init__ lambda_reg": "a ridge of 1 x the mean diagonal",
    "traker.TRAKer.__init__ gradient_computer": "the class of that name here",
}
"""What is different on purpose. Nothing is missing."""


def public(module):
    """The names that a module defines, not those that it imports."""
    for name, value in vars(module).items():
        is_callable = inspect.isroutine(value) or inspect.isclass(value)
        if is_callable and value.__module__ == module.__name__ and not name.startswith("_"):
            yield name, value


def members(kind):
    return [name for name in vars(kind) if name == "__init__" or not name.startswith("_")]


def released_modules():
    released = pytest.importorskip("trak", reason="traker is not installed: nothing to compare")
    for module in pkgutil.iter_modules(released.__path__):
        ours = importlib.import_module(f"gradkeep.compat.trak.{module.name}")
        yield module.name, importlib.import_module(f"trak.{module.name}"), ours


def test_no_public_name_of_the_released_package_is_missing():
    missing = []
    for module, theirs, ours in released_modules():
        for name, value in public(theirs):
            mine = getattr(ours, name, None)
            if mine is None:
                missing.append(f"{module}.{name}")
            elif inspect.isclass(value):
                missing += [
                    f"{module}.{name}.{member}"
                    for member in members(value)
                    if not hasattr(mine, member)
                ]
    assert missing == []


def functions():
    """(full name, theirs, ours) of all functions and methods."""
    for module, theirs, ours in released_modules():
        for name, value in public(theirs):
            mine = getattr(ours, name)
            if not inspect.isclass(value):
                yield f"{module}.{name}", value, mine
                continue
            for member in members(value):
                if inspect.isroutine(getattr(value, member)):
                    yield f"{module}.{name}.{member}", getattr(value, member), getattr(mine, member)


def test_every_call_of_the_released_package_is_understood():
    """The same arguments at the same places, none needed that was not; more may be given."""
    wrong, others = {}, {}
    for name, theirs, ours in functions():
        expected = list(inspect.signature(theirs).parameters.values())
        parameters = list(inspect.signature(ours).parameters.values())
        for place, one in enumerate(expected):
            mine = parameters[place] if place < len(parameters) else None
            if mine is None or (mine.name, mine.kind) != (one.name, one.kind):
                wrong[name] = f"{inspect.signature(theirs)} against {inspect.signature(ours)}"
            elif one.default is not one.empty and mine.default != one.default:
                others[f"{name} {one.name}"] = mine.default
        for more in parameters[len(expected) :]:
            if more.default is more.empty and more.kind not in (
                more.VAR_POSITIONAL,
                more.VAR_KEYWORD,
            ):
                wrong[name] = f"{more.name} is needed"
    assert set(wrong) == set(DIFFERENT), wrong
    assert set(others) == set(DEFAULTS), others


@pytest.mark.parametrize("kind", ["normal", "rademacher"])
def test_blocks_of_a_matrix_are_what_is_multiplied_with(kind):
    x = torch.randn(3, 50)
    basic = projectors.BasicProjector(50, 70, 0, kind, "cpu", block_size=32)
    for model_id in (0, 4):
        whole = basic.project(x, model_id)
        basic.get_generator_states()
        parts = []
        for state in basic.generator_states:
            basic.generate_sketch_matrix(state)
            parts.append(x @ basic.proj_matrix)
        assert [part.shape[1] for part in parts] == [32, 32, 6]
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
        single = projectors.BasicSingleBlockProjector(50, 70, 0, kind, "cpu", model_id=model_id)
        single.generate_sketch_matrix()
        assert torch.allclose(x @ single.proj_matrix, whole, atol=1e-5)
    basic.free_memory()
    assert torch.allclose(basic.project(x, 4), whole, atol=1e-5)
    with pytest.raises(ValueError, match="0 to 2"):
        basic.generate_sketch_matrix(3)


def test_products_of_features_and_targets():
    x, g = torch.randn(7, 5), torch.randn(4, 5)
    truth = x @ g.T
    for actual in (
        utils.get_matrix_mult_standard(x, g, torch.float32),
        utils.get_matrix_mult_blockwise(x, g, torch.float32, 3),
        utils.get_matrix_mult(x, g, use_blockwise=True, batch_size=2),
        utils.get_matrix_mult(x, g),
    ):
        assert torch.allclose(actual, truth, atol=1e-6)
    assert utils.get_matrix_mult_blockwise(x, g, torch.float16, 3).dtype == torch.float16
    assert utils.get_output_memory(x, g, torch.float16) == 7 * 4 * 2
    assert utils.get_free_memory("cpu") > 0
