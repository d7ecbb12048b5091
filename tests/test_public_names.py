"""The public names: a change here is a change for users."""

import subprocess
import sys

import pytest

import gradkeep
import gradkeep.data
import gradkeep.datamodels
import gradkeep.farm
import gradkeep.query
import gradkeep.remat
import gradkeep.store

NAMES = {
    "gradkeep": """
        Array CaptureKey CaptureWarning Captured Checkpoint Classification GradkeepError
        LanguageModelling Layer Measured Projection Ragged Regression Run Schema Scores
        ScoresKey Store Task Weights attribute capture combine data datamodels farm
        gradients layers memory_budget methods open plan project query recording remat store
        suspects
    """,
    "gradkeep.data": """
        BertClassifier CNN Digits Examples GPT ImageFolder MLP ResNet20 ResNet50 ResNet9 Scaling
        Texts VGG16 Vocabulary Workload build checked_sizes dataset default_sizes load_agnews
        load_characters load_cifar10 load_digit_images load_digits load_idx load_image_folder
        load_npz model models published_sizes read_idx zoo
    """,
    "gradkeep.datamodels": """
        Clusters Comparison Components Correlation Counterfactual DataSupport DataValues
        Datamodels Groups LearningCurve Masks Memorisation Neighbours Output PlantedData
        RankedPairs Study TopExamples Training VerifiedRemovals by_group clusters compare
        components confidences correct correlation counterfactual data_support draw_masks
        fit leakage learning_curve load losses margins memorisation near_duplicates
        neighbours output planted similarity top values verify_removals
    """,
    "gradkeep.farm": """
        Engine Failure Job JobSpec LocalProcesses Outcome Progress RayCluster Slurm engine
        format_seconds progress_of recent_rate run work
    """,
    "gradkeep.query": """
        Directions Gradients Plan Products Step Top along cosine dot gradients gram mean
        squares top total variance
    """,
    "gradkeep.remat": """
        Action BudgetPoint BudgetReport DroppedActivation Explanation Graph Heuristic MemoryBudget
        MemoryEvent OnlineReport Op Optimum Policy Program ProgramStep Recorder Schedule
        SimulationResult StashedTensor StepKind Storage Timeline chain checked chen
        collapse_aliases eliminate_constants heuristic heuristics keep_all keeping memory_budget
        merge_tuples optimal read_log record register revolve simplify simulate stash
        unlimited_peak
    """,
    "gradkeep.store": """
        Array Backend Batch Block BlockFacts BlockKey Bucket CaptureKey Catalog
        Checkpoint CheckpointFacts CheckpointInfo Column Damage Durability Encoding
        Entry Info Layer LayerFacts Lease LocalDisk Manifest Memory Place Ragged
        Readable Result RowSetInfo RowState Rows Run RunFacts RunInfo Schema ScoresKey
        Segment SegmentEntry SegmentFacts Share Store Swept Syscalls Verdict Writer
        backend_for describe_rows describe_state format_ratio format_size gc open verify
        zarr_references zarr_view
    """,
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_these(module):
    found = sys.modules[module]
    assert sorted(found.__all__) == sorted(NAMES[module].split())
    for name in found.__all__:
        assert getattr(found, name) is not None


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
