"""All methods, one file per family; the default first."""

from gradkeep.attribution.scorers._baselines import (
    KNN_SHAPLEY,
    LABEL_MATCH,
    LOSS,
    RANDOM,
    SIMILARITY,
)
from gradkeep.attribution.scorers._datainf import DATA_INF
from gradkeep.attribution.scorers._gradient_products import COS, DOT, SELF, TRACIN
from gradkeep.attribution.scorers._influence import ARNOLDI, INFLUENCE
from gradkeep.attribution.scorers._kernel import KERNEL, TRAK
from gradkeep.attribution.scorers._kfac import ADAM, EKFAC, KFAC
from gradkeep.attribution.scorers._logra import LOGRA

ALL = (
    KERNEL,
    TRAK,
    DOT,
    COS,
    TRACIN,
    ADAM,
    SELF,
    KFAC,
    EKFAC,
    LOGRA,
    DATA_INF,
    INFLUENCE,
    ARNOLDI,
    SIMILARITY,
    KNN_SHAPLEY,
    RANDOM,
    LOSS,
    LABEL_MATCH,
)
