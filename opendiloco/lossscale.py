"""The factor on the loss of an fp16 pass: small gradients would round to 0 without it, large ones overflow with it."""

from __future__ import annotations

from collections.abc import Mapping

START = 2.0**16
LARGEST = 2.0**24
GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles."""


class LossScale:
    """A power of two, so that multiplying and dividing by it round nothing (arXiv:1710.03740, section 3.2).

    An overflow costs time, not a step: the batch is computed again at half the scale.
    """

    def __init__(self) -> None:
        self.value = START
        self._good_steps = 0

    def lower(self) -> bool:
        """The gradient was not finite: halve the scale. False: it was 1, so the scale is not to blame.

        Then the worker goes back to other parameters, and the scale to where it began.
        """
        self._good_steps = 0
        if self.value <= 1:
            self.value = START
            return False
        self.value /= 2
        return True

    def count_step(self) -> None:
        """A step with a finite gradient was made."""
        self._good_steps += 1
        if self._good_steps == GROWTH_STEPS:
            self._good_steps = 0
            self.value = min(LARGEST, self.value * 2)

    def state_dict(self) -> dict[str, float]:
        """Everything the next step depends on."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on as the scale that gave `state`."""
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
