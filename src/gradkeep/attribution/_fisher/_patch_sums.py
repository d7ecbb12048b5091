"""Second moments of a convolution's patches, laid out a tile of rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.attribution._fisher._conv import by_channels, order, width
from gradkeep.attribution._fisher._moment import moment, zeros

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.factors import Convolution


class PatchSums:
    """Sums over rows and positions of v v^T of patches v, or of their squares where v is long."""

    def __init__(self, form: Convolution) -> None:
        self.form = form
        self.right = zeros(form.groups, width(form))

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return 8 * self.right.numel()

    @staticmethod
    def operations(form: Convolution) -> int:
        """Products a row and group, of which the mirrored ones are not made."""
        return form.positions * width(form) ** 2 * 5 // 8

    def add(self, wide: Tensor) -> None:
        """Add rows `[B, C, *size]`."""
        for groups in by_channels(self.form, wide):
            for into, patches in zip(self.right, groups, strict=True):
                into += moment(patches, into)

    def moments(self) -> Tensor:
        """`[groups, d, d]` or their diagonals `[groups, d]`, columns as the weight's."""
        at = order(self.form)
        return self.right[:, at] if self.right.dim() == 2 else self.right[:, at][:, :, at]
