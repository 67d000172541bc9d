"""What a training run measured."""
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mgpu.utils import notebook
from mgpu.utils.files import FilePath


@dataclass
class History:
    """What a training run measured.

    Attributes
    ----------
    devices : list of str
    train_loss : list of float
        Mean loss per example, by epoch.
    test_acc : list of float
        Between 0 and 1, by epoch; empty without test data.
    seconds : list of float
        Training time by epoch, all devices waited for, without evaluation.
    images_per_second : list of float
    loss_per_step : list of float
        Mean loss per example of each batch.
    """

    devices: list[str] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    test_acc: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    images_per_second: list[float] = field(default_factory=list)
    loss_per_step: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, list[Any]]:
        """Copies of the lists by name: fit for JSON and for pandas."""
        return {name: list(x) for name, x in vars(self).items()}

    def plot(self, file: FilePath | None = None) -> Any:
        """Draw the loss of each step, and the means and the test accuracy of
        each epoch: `mgpu.tools.plotting.plot_history`.

        Parameters
        ----------
        file : path, optional
            ``.png`` or ``.svg``. None: show the figure in a notebook.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ValueError
            No step was trained, or `file` has another ending.
        FileNotFoundError
            The folder of `file` does not exist.
        ImportError
            Matplotlib is not installed.
        """
        from mgpu.tools.plotting import plot_history
        return plot_history(self.to_dict(), file)

    def of_epochs(self, count: int) -> dict[str, list[Any]]:
        """The lists by name, those of epochs with `count` entries: fit for
        JSON."""
        return {name: x if name in ("devices", "loss_per_step")
                else x[:count] for name, x in self.to_dict().items()}

    def take(self, lists: Mapping[str, list[Any]]) -> None:
        """Continue the lists of an earlier run (`of_epochs`)."""
        for name in vars(self):
            if name != "devices":
                getattr(self, name)[:] = lists[name]

    def __repr__(self) -> str:
        return f"History of {len(self.seconds)} epochs: {self.summary()}"

    def _repr_html_(self) -> str:
        blank = [""] * len(self.seconds)
        return notebook.table(
            self.summary(), ("epoch", "train loss", "test accuracy",
                             "seconds", "images/s"), [
                (i + 1, f"{loss:.4f}", acc and f"{acc:.4f}", f"{s:.2f}",
                 f"{rate:.0f}") for i, (loss, acc, s, rate) in enumerate(zip(
                     self.train_loss, self.test_acc or blank, self.seconds,
                     self.images_per_second, strict=False))])

    def summary(self) -> str:
        """One line, as the book prints it: the last test accuracy (without
        test data, the last training loss), seconds per epoch, devices."""
        if not self.seconds:
            return f"no finished epoch on [{', '.join(self.devices)}]"
        acc = f"test acc: {self.test_acc[-1]:.2f}, " if self.test_acc else \
            f"train loss: {self.train_loss[-1]:.3f}, "
        return (f"{acc}{float(np.mean(self.seconds)):.1f} sec/epoch on "
                f"[{', '.join(self.devices)}]")
