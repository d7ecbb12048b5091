"""Attribution: scores of training rows for queries, from captures."""

from gradkeep.attribution._attribute import attribute
from gradkeep.attribution._combine import combine
from gradkeep.attribution._method import Method, NoOptions, Scorer
from gradkeep.attribution._question import AttributionQuestion, CheckpointView, RunCheckpoint
from gradkeep.attribution._registry import methods, register_method, unregister_method
from gradkeep.attribution._scores import RankedRows, Scores
from gradkeep.attribution._solve import (
    StreamedRows,
    add_damped_scores,
    add_products,
    relative_damping,
    row_blocks,
    streamed_gram,
)
from gradkeep.attribution._suspects import Suspects, suspects
from gradkeep.attribution.projections import (
    GradientSketch,
    Projection,
    ProjectionSum,
    add_rows,
    project,
    project_dense,
    project_parameters,
    require_room,
    signs_or_normals,
    sketch_of,
)

__all__ = [
    "AttributionQuestion",
    "CheckpointView",
    "GradientSketch",
    "Method",
    "NoOptions",
    "Projection",
    "ProjectionSum",
    "RankedRows",
    "RunCheckpoint",
    "Scorer",
    "Scores",
    "StreamedRows",
    "Suspects",
    "add_damped_scores",
    "add_products",
    "add_rows",
    "attribute",
    "combine",
    "methods",
    "project",
    "project_dense",
    "project_parameters",
    "register_method",
    "relative_damping",
    "require_room",
    "row_blocks",
    "signs_or_normals",
    "sketch_of",
    "streamed_gram",
    "suspects",
    "unregister_method",
]
