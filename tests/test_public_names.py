"""The public names: a change here is a change for users."""

import importlib
import pickle
import subprocess
import sys

import pytest

import gradkeep
import gradkeep.errors

NAMES = {
    "gradkeep": """
        CaptureWarning Captured Classification GradkeepError Keep LanguageModeling LayerGradients
        LayerRule Measured Method Preview Projection Regression Scorer Scores Store Task Weights
        attribute attribute_once attribute_tokens capture combine completions datamodels errors
        evaluate gradients groups layers memory_budget methods open plan project query read_adam
        recording register_layer_rule register_method remat show store suspects text_similarity
    """,
    "gradkeep.evaluate": """
        Evaluation Recipe agreement check_removal class_retrieval compare datamodel_scores evaluations find_leaks ground_truth hybrid judge_methods label_detection lds leakage leave_one_out load_truth out_of_fold rank_sum removal_curve sanity_check select_rows stability suggest_labels verify_rows
    """,
    "gradkeep.datamodels": """
        Datamodels Masks Study Training by_group clusters compare components correlation
        counterfactual data_support fit leakage learning_curve load losses margins memorization
        near_duplicates neighbors planted similarity top values verify_removals
    """,
    "gradkeep.remat": """
        BudgetPoint BudgetReport Explanation Graph Heuristic MemoryBudget Optimum Program Recorder
        SimulationResult chain chen heuristic heuristics keep_all memory_budget optimal read_log record
        register revolve simplify simulate stash unlimited_peak
    """,
    "gradkeep.errors": """
        AttributionError BudgetError BudgetWarning CaptureError ConflictError DamagedError DataError DatamodelsError EvaluationError EvidenceWarning FarmError FormatTooNewError GradkeepError InvalidRowsError LeaseLostError MissingExtraError MissingRowsError NotAStoreError NotSealedError QueryError ReadOnlyError RematError SchemaMismatchError StepChangedError StoreError WriteFailedError
    """,
    "gradkeep.store": """
        Array Backend BasisKey Batch Block Bucket CaptureKey Checkpoint Decision EvaluationKey
        Layer LocalDisk Memory Ragged Rows Run Schema ScoresKey Store gc open register_backend
        verify zarr_references zarr_view
    """,
    "gradkeep.testing": """
        StoreTests
    """,
    "gradkeep.data": """
        CNN GPT MLP ResNet9 dataset load_cifar10 load_digit_images load_digits model models
    """,
    "gradkeep.farm": "LocalProcesses RayCluster Slurm engine run work",
    "gradkeep.query": """
        Gradients along along_tokens cosine dot gradients gram mean small_codes squares tokens top
        total variance
    """,
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_these(module):
    package = importlib.import_module(module)
    assert sorted(package.__all__) == sorted(NAMES[module].split())
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = gradkeep.no_such_name


def test_importing_gradkeep_imports_nothing_heavy():
    code = (
        "import sys, gradkeep; "
        "print([m for m in ('torch', 'numpy', 'pyarrow', 'duckdb', 'rich') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_store_never_imports_torch():
    code = "import sys, gradkeep.store; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize("name", gradkeep.errors.__all__)
def test_every_error_is_shown_under_its_public_name_and_survives_pickling(name):
    kind = getattr(gradkeep.errors, name)
    assert kind.__module__ == "gradkeep.errors"
    if issubclass(kind, Warning):
        assert str(pickle.loads(pickle.dumps(kind("what")))) == "what"
        return
    assert issubclass(kind, gradkeep.GradkeepError)
    error = pickle.loads(pickle.dumps(kind("what", path="p", found=1, expected=2, fix="f")))
    assert type(error) is kind
    output = (error.message, error.path, error.found, error.expected, error.fix)
    assert output == ("what", "p", 1, 2, "f")


def test_the_tree_of_errors_in_their_documentation_is_complete():
    for name in gradkeep.errors.__all__:
        assert f" {name} " in f" {gradkeep.errors.__doc__} ".replace("\n", " ")


def test_no_module_keeps_an_error_of_its_own_that_users_may_see():
    """Errors that leave gradkeep are in `gradkeep.errors`; those of other systems' names are not."""
    public = [getattr(gradkeep, name) for name in gradkeep.__all__]
    kinds = [item for item in public if isinstance(item, type) and issubclass(item, Exception)]
    assert {kind.__module__ for kind in kinds if not issubclass(kind, Warning)} == {
        "gradkeep.errors"
    }
