"""The public names: a change here is a change for users."""

import ast
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys

import pytest

import gradkeep
import gradkeep.attribution
import gradkeep.capturing
import gradkeep.data
import gradkeep.datamodels
import gradkeep.errors
import gradkeep.evaluate
import gradkeep.factors
import gradkeep.farm
import gradkeep.query
import gradkeep.remat
import gradkeep.store
import gradkeep.store.backends
import gradkeep.store.blocks
import gradkeep.store.catalog
import gradkeep.store.rows
import gradkeep.testing
import gradkeep.web

NAMES = {
    "gradkeep": """
        Array CaptureKey CaptureWarning Captured Checkpoint CheckpointView Classification
        GradkeepError LanguageModelling Layer LayerGradients LayerRule Measured Method
        Projection Ragged Regression Run Schema Scorer Scores ScoresKey Store Task TokenScores Weights
        attribute attribute_tokens attribution capture capturing combine completions data datamodels errors factors farm
        gradients layers memory_budget methods open plan project query recording
        register_layer_rule register_method remat store suspects
    Keep Preview attribute_once evaluate groups show text_similarity """,
    "gradkeep.evaluate": """
        CheckedRemoval ChosenRows Curve Difference Evaluation GroundTruth JudgedMethod
        Judgement MoreModels Recipe RemovalCurve RowGroup RowGroups SampleSizes
        SanityCheck agreement check_removal class_retrieval compare datamodel_scores evaluations
        find_leaks ground_truth groups hybrid judge_methods label_detection lds
        leakage leave_one_out load_truth out_of_fold randomise rank_sum removal_curve
        sanity_check select_rows stability suggest_labels verify_rows
        OpposingClusters RowMap map_rows map_targets """,
    "gradkeep.factors": """
        AnyForm ArraySource CACHED Compute Convolution ConvolutionRows Cost CostCounter
        Dense DenseRows Form GradientRows Lookup LookupRows MachineSpeeds Outer
        OuterProducts OuterRows Parameter ProductSize RESTORED Spans Storage Tied TiedRows
        VALUE WHOLE WeightBlock WeightMatrix WeightVector form_from_fields form_to_fields
        pad pairwise row_of spans squared_lengths sum_rows tiles widened
    BitRows BitWidth Bits BlockProjection LayerProjection MOST_IN_GROUP PACKED
        PositionProducts bit_scales bits_told packed_bits squared sum_columns   """,
    "gradkeep.capturing": """
        AdamState CapturePlan CaptureSettings CaptureWarning Captured Classification GradientRecording
        KeptLayer LanguageModelling LayerCall LayerGradients LayerRule LayerTable LayerUnit
        ListedLayer Measured Mode PlannedLayer PreparedCapture Regression ReplayedTokens SampleAxis Task
        Weights batch_size buffers_kept by_sample capture completions digests fingerprint_weights in_mode is_steady layer_rules layers
        load_weights plan prepare_capture put_weights read_adam recording register_layer_rule
        replay_tokens rows_at_once rows_of to_device unregister_layer_rule
    PlaceCosts ScalePlan WorkerCosts
    Keep  Batches MomentsSoon Traced Tracer task_batches measure_moments ready """,
    "gradkeep.attribution": """
        AttributionQuestion CheckpointView LabelNoise Method NoOptions Projection RankedRows
        RunCheckpoint Scorer Scores ShownScores StreamedRows Suspects SuspicionThreshold TokenScores
        add_damped_scores add_products
        attribute attribute_tokens combine methods project project_dense project_layers project_parameters
        register_method relative_damping row_blocks signs_or_normals streamed_gram suspects
        unregister_method
    FALLING HALVES SubsetOutcomes default_method attribute_once subset_digests show text_similarity """,
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
        Engine Failure Job JobSpec LocalProcesses Outcome Progress RayCluster Slurm blocks_of
        check_place engine format_seconds packed progress_of recent_rate run share_out size_of work
        worker_number
    """,
    "gradkeep.query": """
        ComputeChoice ComputeWish DEFAULT_BUDGET Directions FactorBatch GradientOf
        GradientPair Gradients LayerChoice MemoryShares NamedLayer ProductEngine ProductTile
        Products QueryPlan QueryStep SmallCodes TokenProducts TopRows along along_tokens check_pairs choose_compute cosine dot
        gradients gradients_of gram machine_speeds mean memory_shares open_capture
        select_layers small_codes squares tokens top total variance
        KeptMoments SideMoments
    """,
    "gradkeep.remat": """
        Action BudgetPoint BudgetReport DroppedActivation Explanation Graph Heuristic MemoryBudget
        MemoryEvent OnlineReport Op Optimum Policy Program ProgramStep Recorder Schedule
        SimulationResult StashedTensor StepKind Storage Timeline budget_is_active chain checked chen
        collapse_aliases eliminate_constants heuristic heuristics keep_all keeping memory_budget
        merge_tuples optimal read_log record register revolve simplify simulate stash
        unlimited_peak
    """,
    "gradkeep.errors": """
        AttributionError BudgetError BudgetWarning CaptureError Conflict Damaged DataError
        DatamodelsError EvaluationError EvidenceWarning
        FarmError FormatTooNew GradkeepError InvalidRows LeaseLost LogError MissingExtra
        MissingRows NotAStore NotExpressible NotSealed QueryError ReadOnly RematError
        SchemaMismatch SqlError StepChanged StoreError StudyError WriteFailed
    """,
    "gradkeep.store": """
        Array Backend Batch Block BlockKey Bucket CaptureKey Checkpoint Damage Durability
        Encoding Entry GcReport Layer Lease LocalDisk Memory Ragged Readable RowCounts RowState Rows
        Run Schema ScoresKey Store Verdict Writer WriterShare backend_for gc open
        register_backend verify zarr_references zarr_view
    BasisKey EvaluationKey Decision standing """,
    "gradkeep.store.backends": """
        Backend Bucket Durability Entry LocalDisk Memory Readable Syscalls backend_for
        register_backend
    """,
    "gradkeep.store.blocks": """
        Array Batch Block Column Encoding Layer Manifest Ragged Schema Segment SegmentEntry
        Writer WriterShare zarr_references zarr_view
    """,
    "gradkeep.store.catalog": """
        BlockAddress BlockFacts Catalog CheckpointFacts CheckpointInfo LayerFacts RowSetInfo
        RunFacts RunInfo SegmentFacts SqlResult StoreInfo
    """,
    "gradkeep.store.rows": """
        Lease RowCounts RowState Rows
    """,
    "gradkeep.testing": """
        BackendTests StoreTests
    """,
    "gradkeep.web": """
        Access RequestLimits ShownRow create_app serve write_report
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
    told = (error.what, error.path, error.found, error.expected, error.fix)
    assert told == ("what", "p", 1, 2, "f")


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


def defined_classes():
    """Every class of gradkeep by its name, which exists once."""
    found = {}
    for module in pkgutil.walk_packages(gradkeep.__path__, "gradkeep."):
        if module.name.endswith("__main__"):
            continue
        imported = importlib.import_module(module.name)
        for name, value in vars(imported).items():
            if inspect.isclass(value) and value.__module__ == module.name:
                assert name not in found or name.startswith("_"), f"{name} exists twice"
                found[name] = module.name
    return found


def returned_names(function):
    """The names in the annotation of what a function returns."""
    written = getattr(function, "__annotations__", {}).get("return", "None")
    parsed = ast.parse(written if isinstance(written, str) else "None", mode="eval")
    return {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}


def test_what_public_functions_and_methods_return_is_public():
    classes = defined_classes()
    rooms = [module for module in NAMES if module != "gradkeep.testing"]
    rooms += ["gradkeep.datamodels.study", "gradkeep.datamodels.fitting"]
    public = {name for room in rooms for name in importlib.import_module(room).__all__}
    hidden = []
    for room in NAMES:
        for name in sys.modules[room].__all__:
            value = getattr(sys.modules[room], name)
            functions = {name: value} if inspect.isroutine(value) else {}
            if inspect.isclass(value) and value.__module__.startswith("gradkeep"):
                functions |= {
                    f"{name}.{part}": getattr(member, "fget", None) or member
                    for part, member in vars(value).items()
                    if not part.startswith("_")
                }
            for path, function in functions.items():
                kinds = returned_names(inspect.unwrap(function)) & classes.keys() - public
                hidden += [f"{room}.{path} -> {kind} ({classes[kind]})" for kind in kinds]
    assert not hidden, hidden
