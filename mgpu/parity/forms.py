"""How values travel between parameters of other forms.

A step turns a list of arrays into another list with the same elements. Axes
before those of the parameter stay in front: a running statistic has one for
the devices.
"""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]
Arrays = Sequence[np.ndarray]


class Turn(NamedTuple):
    """Transpose each array."""

    axes: tuple[int, ...]

    def __call__(self, values: Arrays) -> list[np.ndarray]:
        leads = [range(x.ndim - len(self.axes)) for x in values]
        return [x.transpose([*lead, *(i + len(lead) for i in self.axes)])
                for x, lead in zip(values, leads)]

    def inverse(self) -> "Turn":
        return Turn(tuple(int(i) for i in np.argsort(self.axes)))

    def __str__(self) -> str:
        return f"transposed to {self.axes}"


class View(NamedTuple):
    """Give each array of shape `before` the shape `after`."""

    before: Shape
    after: Shape

    def __call__(self, values: Arrays) -> list[np.ndarray]:
        return [x.reshape(x.shape[:x.ndim - len(self.before)] + self.after)
                for x in values]

    def inverse(self) -> "View":
        return View(self.after, self.before)

    def __str__(self) -> str:
        return f"reshaped to {self.after}"


class Blocks(NamedTuple):
    """Reorder the equal blocks along the first axis of arrays with `rank`
    axes: block ``order[i]`` comes to place i."""

    rank: int
    order: tuple[int, ...]

    def __call__(self, values: Arrays) -> list[np.ndarray]:
        return [np.concatenate([blocks[i] for i in self.order], -self.rank)
                for blocks in (np.split(x, len(self.order), -self.rank)
                               for x in values)]

    def inverse(self) -> "Blocks":
        return Blocks(self.rank, Turn(self.order).inverse().axes)

    def __str__(self) -> str:
        return f"in blocks {self.order}"


class Join(NamedTuple):
    """Join arrays of `shapes` along an axis; None: as flat ones."""

    shapes: tuple[Shape, ...]
    axis: int | None

    def __call__(self, values: Arrays) -> list[np.ndarray]:
        if self.axis is None:
            values = [x.reshape(*x.shape[:x.ndim - len(shape)], -1)
                      for x, shape in zip(values, self.shapes)]
        return [np.concatenate(values, self.place())]

    def place(self) -> int:
        """The axis, counted from the last."""
        return -1 if self.axis is None else self.axis - len(self.shapes[0])

    def shape(self) -> Shape:
        """That of the joined array."""
        if self.axis is None:
            return (sum(int(np.prod(shape)) for shape in self.shapes),)
        first = list(self.shapes[0])
        first[self.axis] = sum(shape[self.axis] for shape in self.shapes)
        return tuple(first)

    def inverse(self) -> "Split":
        return Split(*self)

    def __str__(self) -> str:
        return "joined" + self.along()

    def along(self) -> str:
        """The axis in words."""
        return " as flat ones" if self.axis is None \
            else f" along axis {self.axis}"


class Split(NamedTuple):
    """Undo `Join`."""

    shapes: tuple[Shape, ...]
    axis: int | None

    def __call__(self, values: Arrays) -> list[np.ndarray]:
        whole, = values
        join = Join(*self)
        lead = whole.shape[:whole.ndim - len(join.shape())]
        ends = np.cumsum([
            np.prod(shape) if self.axis is None else shape[self.axis]
            for shape in self.shapes])[:-1].astype(int)
        return [x.reshape(lead + shape) for x, shape in zip(
            np.split(whole, ends, join.place()), self.shapes)]

    def inverse(self) -> Join:
        return Join(*self)

    def __str__(self) -> str:
        return "split" + Join(*self).along()


class Each(NamedTuple):
    """Take steps of its own with each array."""

    steps: tuple[tuple["Step", ...], ...]

    def __call__(self, values: Arrays) -> list[np.ndarray]:
        return [take(steps, [x])[0] for steps, x in zip(self.steps, values)]

    def inverse(self) -> "Each":
        return Each(tuple(map(undone, self.steps)))

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(map(text, self.steps)))


Step = Turn | View | Blocks | Join | Split | Each


def take(steps: Sequence[Step], values: Arrays) -> list[np.ndarray]:
    """The arrays after all steps."""
    for step in steps:
        values = step(values)
    return list(values)


def undone(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps back."""
    return tuple(step.inverse() for step in reversed(steps))


def text(steps: Sequence[Step]) -> str:
    """The steps in words."""
    return ", ".join(filter(None, map(str, steps))) or "as it is"
