"""Products, top-k, Gram matrices and statistics of stored gradients, without restoring them."""

from gradkeep.query._build_codes import small_codes
from gradkeep.query._gradients import Gradients, gradients
from gradkeep.query._products import cosine, dot, gram, top
from gradkeep.query._sums import along, mean, squares, total, variance
from gradkeep.query._tokens import along_tokens, tokens

__all__ = [
    "Gradients",
    "along",
    "along_tokens",
    "cosine",
    "dot",
    "gradients",
    "gram",
    "mean",
    "small_codes",
    "squares",
    "tokens",
    "top",
    "total",
    "variance",
]
