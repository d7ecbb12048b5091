"""Where projections of B rows add up: numbers with room to wrap around, and their spectrum."""

from __future__ import annotations

import torch
from torch import Tensor


class Sum:
    """The sketch `[B, k]` of rows, as the sum of what was added so far.

    Blocks of up to k numbers are added at a shift below k without looking at the end: the buffer
    has 2k numbers, and the second half is added to the first when all is done. Products of
    spectra are added as spectra, so that all layers share one inverse transform.
    """

    def __init__(self, rows: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dim = dim
        self.buffer = torch.zeros(rows, 2 * dim, dtype=dtype, device=device)
        self._spectrum: Tensor | None = None

    def add_spectrum(self, start: int, spectrum: Tensor) -> None:
        """Add to rows from `start` on what has this half spectrum `[b, k // 2 + 1]`."""
        if self._spectrum is None:
            self._spectrum = spectrum.new_zeros(len(self.buffer), spectrum.shape[1])
        self._spectrum[start : start + len(spectrum)] += spectrum

    def values(self) -> Tensor:
        """The sum `[B, k]`."""
        out = self.buffer[:, : self.dim] + self.buffer[:, self.dim :]
        if self._spectrum is not None:
            out += torch.fft.irfft(self._spectrum, n=self.dim)
        return out
