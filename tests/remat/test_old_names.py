"""Names of the version before: they still work, and say what they are called now."""

import pytest

import gradkeep.remat


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Event", "MemoryEvent"),
        ("Kind", "StepKind"),
        ("Outcome", "SimulationResult"),
        ("Report", "BudgetReport"),
        ("Step", "ProgramStep"),
    ],
)
def test_an_old_name_gives_the_new_one_and_warns(old, new):
    with pytest.warns(DeprecationWarning, match=rf"gradkeep\.remat\.{new}"):
        found = getattr(gradkeep.remat, old)
    assert found is getattr(gradkeep.remat, new)
