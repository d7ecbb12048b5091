"""What is public: types with the functions that return them, and names of earlier versions."""

import importlib
import inspect
import re
import warnings

import numpy as np
import pytest
import torch

import gradkeep as gk
from gradkeep import datamodels, farm, store
from gradkeep.datamodels import Study, Training, fitting, margins, study

OLD = {
    "gradkeep.datamodels": """
        COMPLETED Clusters Comparison Components Correlation Counterfactual Counts
        Datamodels DatamodelsError Groups LearningCurve MODELS MainJob Masks
        Memorisation Neighbours NpyFolder Output Pairs Planted Published RegressionData
        Spec Status Study Support Top Training Values Verified by_group clusters collect
        compare components compute confidences correct correlation counterfactual
        data_support draw_masks export_folder fit import_folder import_published
        initialize leakage learning_curve load load_main load_memmap load_weights losses
        margins memorisation models_of near_duplicates neighbours open_published output
        planted save_weights similarity status top train_row values verify_removals work
    """,
    "gradkeep.farm": """
        Engine Failure Job LocalProcesses Order Outcome Progress RayCluster Slurm engine
        format_seconds progress_of recent_rate run
    """,
}

ANYWHERE = {
    *[
        "Any",
        "AnyArray",
        "Callable",
        "Iterator",
        "Literal",
        "Mapping",
        "Module",
        "None",
        "Optimizer",
        "Path",
        "Tensor",
    ]
}


def returned(thing):
    """The names in what a function, or a class's methods and fields, hand out."""
    if not inspect.isclass(thing):
        return set(re.findall(r"\b[A-Z]\w*", str(inspect.signature(thing).return_annotation)))
    found = [
        member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        for name, member in vars(thing).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    ]
    fields = " ".join(map(str, vars(thing).get("__annotations__", {}).values()))
    return set(re.findall(r"\b[A-Z]\w*", fields)).union(*(returned(one) for one in found))


@pytest.mark.parametrize("room", [datamodels, farm])
def test_what_a_public_function_returns_is_public(room):
    homes = [datamodels, farm, store, fitting, study, gk]
    public = ANYWHERE.union(*(home.__all__ for home in homes))
    for name in room.__all__:
        thing = getattr(room, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert returned(thing) <= public, name


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in OLD.items() for name in names.split()]
)
def test_every_old_name_works_and_one_that_moved_says_where(module, name):
    room = importlib.import_module(module)
    if name in room.__all__:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert getattr(room, name) is not None
        return
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{name} is now gradkeep\.") as caught:
        found = getattr(room, name)
    home, _, new = str(caught[0].message).split(" is now ")[1].split(";")[0].rpartition(".")
    assert getattr(importlib.import_module(home), new) is found
    assert "._" not in home, "a new name is a public one"


def test_a_study_takes_its_store_last_as_it_did(tmp_path):
    x, y = torch.eye(6), torch.tensor([0, 1, 0, 1, 0, 1])
    training = Training(linear, epochs=1, batch_size=3)
    options = {"num_models": 2, "outputs": margins((x, y)), "stacked": False}
    with pytest.warns(DeprecationWarning, match=r"Study\(store, dataset, train_fn"):
        old = Study((x, y), training, store=tmp_path / "old", **options)
    new = Study(tmp_path / "new", (x, y), training, **options)
    named = Study(store=tmp_path / "named", dataset=(x, y), train_fn=training, **options)
    for made in (new, old, named):
        assert made.run(workers=0).complete
        np.testing.assert_array_equal(made.outputs(), new.outputs())


def linear():
    return torch.nn.Linear(6, 2)
