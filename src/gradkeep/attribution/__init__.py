"""Attribution: scores of training rows for queries, from captures."""

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names
from gradkeep.attribution._attribute import attribute
from gradkeep.attribution._combine import combine
from gradkeep.attribution._label_noise import LabelNoise, SuspicionThreshold
from gradkeep.attribution._method import Method, NoOptions, Scorer
from gradkeep.attribution._question import AttributionQuestion, CheckpointView, RunCheckpoint
from gradkeep.attribution._registry import (
    default_method,
    methods,
    register_method,
    unregister_method,
)
from gradkeep.attribution._scores import RankedRows, Scores
from gradkeep.attribution._shown_scores import ShownScores, show
from gradkeep.attribution._solve import (
    StreamedRows,
    add_damped_scores,
    add_products,
    relative_damping,
    row_blocks,
    streamed_gram,
)
from gradkeep.attribution._suspects import Suspects, suspects
from gradkeep.attribution._text_similarity import text_similarity
from gradkeep.attribution._tuning import FALLING, HALVES, SubsetOutcomes, subset_digests
from gradkeep.attribution.projections import (
    Projection,
    project,
    project_dense,
    project_layers,
    project_parameters,
    signs_or_normals,
)

if TYPE_CHECKING:
    from gradkeep.attribution._once import attribute_once
    from gradkeep.attribution._tokens import TokenScores, attribute_tokens
else:  # what runs models is loaded when it is used: questions about captures answer sooner
    __getattr__ = lazy_names(
        __name__,
        {
            "attribute_once": "gradkeep.attribution._once",
            "TokenScores": "gradkeep.attribution._tokens",
            "attribute_tokens": "gradkeep.attribution._tokens",
        },
    )

__all__ = [
    "FALLING",
    "HALVES",
    "AttributionQuestion",
    "CheckpointView",
    "LabelNoise",
    "Method",
    "NoOptions",
    "Projection",
    "RankedRows",
    "RunCheckpoint",
    "Scorer",
    "Scores",
    "ShownScores",
    "StreamedRows",
    "SubsetOutcomes",
    "Suspects",
    "SuspicionThreshold",
    "TokenScores",
    "add_damped_scores",
    "add_products",
    "attribute",
    "attribute_once",
    "attribute_tokens",
    "combine",
    "default_method",
    "methods",
    "project",
    "project_dense",
    "project_layers",
    "project_parameters",
    "register_method",
    "relative_damping",
    "row_blocks",
    "show",
    "signs_or_normals",
    "streamed_gram",
    "subset_digests",
    "suspects",
    "text_similarity",
    "unregister_method",
]
