"""Every method, one file each; the default first."""

from gradkeep._attribute._methods import (
    _cos,
    _datainf,
    _dot,
    _kernel,
    _kfac,
    _knn_shapley,
    _label_match,
    _logra,
    _loss,
    _random,
    _self,
    _similarity,
    _tracin,
    _trak,
)

ALL = (
    _kernel.METHOD,
    _trak.METHOD,
    _dot.METHOD,
    _cos.METHOD,
    _tracin.METHOD,
    _self.METHOD,
    _kfac.KFAC,
    _kfac.EKFAC,
    _logra.METHOD,
    _datainf.METHOD,
    _similarity.METHOD,
    _knn_shapley.METHOD,
    _random.METHOD,
    _loss.METHOD,
    _label_match.METHOD,
)
