"""What losses are multiplied by before a backward pass, so that small
gradients do not vanish in float16."""
from collections.abc import Sequence
from typing import Any

import numpy as np

from mgpu.backends import Backend
from mgpu.backends.types import Array
from mgpu.utils.arguments import is_number, one_of


class LossScale:
    """A fixed factor, or the rule of ``torch.amp.GradScaler`` (torch's
    ``amp/grad_scaler.py`` and ``_amp_update_scale_``) with its defaults.

    Parameters
    ----------
    scale : float, "dynamic" or None
        "dynamic": 2**16 at first; `backoff` halves the scale, and 2000 good
        steps in a row double it. None: 1, and nothing to look after.
    nonfinite : {"raise", "skip", "ignore"}, optional
        What becomes of an update whose gradients are not all finite.

    Attributes
    ----------
    value : float
        The scale now, a normal float32.
    dynamic : bool
    nonfinite : str
        By default "skip" with a dynamic scale, else "ignore".
    good_steps : int
        Updates since the scale has changed.
    skipped_steps : int
        Updates that were skipped because a gradient was not finite.

    Raises
    ------
    ValueError
        Another `scale` than a finite number above 0; another `nonfinite`, or
        another than "skip" with a dynamic scale.
    """

    FIRST, GROWTH_INTERVAL = 2.0 ** 16, 2000

    def __init__(self, scale: float | str | None,
                 nonfinite: str | None = None) -> None:
        self.dynamic = isinstance(scale, str) and scale == "dynamic"
        if not self.dynamic and scale is not None:
            check_loss_scale(scale)
        self.value = self.FIRST if self.dynamic \
            else 1.0 if scale is None else float(scale)
        self.nonfinite = nonfinite or ("skip" if self.dynamic else "ignore")
        one_of("nonfinite", self.nonfinite, ("raise", "skip", "ignore"))
        if self.dynamic and self.nonfinite != "skip":
            raise ValueError(
                "a dynamic loss_scale skips updates whose gradients are not "
                f"finite; received nonfinite={nonfinite!r}. Leave it out, or "
                "give a fixed loss_scale.")
        self.good_steps = self.skipped_steps = 0

    def backoff(self) -> None:
        """A gradient was not finite: the update is skipped, and a dynamic
        scale halved."""
        if self.dynamic:
            self.value = max(self.value * 0.5, 2.0 ** -126)
        self.skipped_steps += 1
        self.good_steps = 0

    def succeed(self) -> None:
        """An update was made; under a dynamic scale it counts."""
        if self.dynamic:
            self.good_steps += 1
            if self.good_steps == self.GROWTH_INTERVAL:
                self.value = min(self.value * 2.0, 2.0 ** 127)
                self.good_steps = 0


def check_loss_scale(value: Any) -> None:
    """ValueError for anything but a finite number above 0."""
    if not is_number(value) or not 0 < value < float("inf"):
        raise ValueError(
            "loss_scale must be None, 'dynamic' or a finite number above 0; "
            f"received {value!r}. Use a power of two, such as 1024.0.")


def all_finite(backend: Backend, arrays: Sequence[Array]) -> bool:
    """Whether no element is infinite or NaN; waits for the arrays."""
    ops, total = backend.ops, None
    for x in arrays:
        # Zero times a number is 0, times infinity or NaN it is NaN.
        here = ops.astype(ops.sum(x * 0.0), "float32")
        total = here if total is None else total + here
    return total is None or not np.isnan(backend.to_numpy(total)).any()
