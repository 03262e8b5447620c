"""What a worker brings to a round: its pseudo-gradient, made and encoded where its parameters are.

On a GPU worker only the encoded bytes cross to the host, where the network process sends them from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opendiloco.codec import Codec
from opendiloco.compute import out_of_memory
from opendiloco.flat import scatter, write_pseudo_gradient


class Contribution:
    """The pseudo-gradient of one replica, and theta as the replica sees it."""

    def __init__(self, parameters: Sequence[Tensor], codec: Codec, theta: Tensor, out: Tensor) -> None:
        """Make room for it on the parameters' device.

        Args:
            theta: fp32 [N] on the host, the outer parameters; used as it is, and copied to another device only.
            out: uint8 [wire_bytes(N)] on the host, takes the encoded pseudo-gradient.

        Raises:
            SettingsError: there is no room for two vectors of theta's size.
        """
        self._parameters, self._codec, self._theta, self._out = parameters, codec, theta, out
        self._anchor, self._gradient = theta, torch.empty(0)
        self._follow()

    def restart(self, *, keep_work: bool = False) -> None:
        """Set the parameters to theta, which has changed.

        Args:
            keep_work: with the pseudo-gradient measured last on top.
        """
        self._follow()
        if self._anchor is not self._theta:
            self._anchor.copy_(self._theta)
        if keep_work:
            torch.sub(self._anchor, self._gradient, out=self._gradient)
        scatter(self._gradient if keep_work else self._anchor, self._parameters)

    def measure(self) -> float:
        """theta - theta_i; returns its norm."""
        self._follow()
        write_pseudo_gradient(self._anchor, self._parameters, self._gradient)
        return float(torch.linalg.vector_norm(self._gradient))

    def encode(self) -> None:
        """Encode what was measured last.

        Raises:
            NonFiniteError: a value is not finite.
        """
        on_host = self._gradient.device == self._out.device
        encoded = self._codec.encode(self._gradient, self._out if on_host else None)
        if not on_host:
            self._out.copy_(encoded)

    def _follow(self) -> None:
        """Have the vectors where the parameters are, which somebody may have moved: accelerate does so late."""
        theta, parameters = self._theta, self._parameters
        device = parameters[0].device if parameters else theta.device
        if self._gradient.numel() == theta.numel() and self._gradient.device == device:
            return
        copies = 1 if device == theta.device else 2
        size = f"{copies * theta.nbytes / 1e9:.2f} GB"
        cure = "use a smaller model, or train less of it (frozen parameters, adapters)"
        with out_of_memory(
            lambda: (
                f"out of memory: DiLoCo needs {size} on {device} beside the model and its optimizer, for {copies} "
                f"fp32 copies of the {theta.numel()} trained parameters: {cure}"
            )
        ):
            measured, self._gradient = self._gradient, torch.empty_like(theta, device=device)
            self._gradient[: measured.numel()] = measured
            self._anchor = theta if device == theta.device else theta.to(device)
