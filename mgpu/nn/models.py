"""The two networks of the book, for both backends.

`lenet` and `resnet18` make native networks without values, for
`mgpu.initialize`; on torch their parameters are NaN until something is
written to them. `lenet_params` and `lenet_forward` are LeNet from scratch,
as a list of arrays and a function.
"""
from collections.abc import Sequence
from typing import Any

import numpy as np

from mgpu.backends import get_backend
from mgpu.nn import functional as F, initializers
from mgpu.utils.arguments import integer

#: names and shapes of the parameters of LeNet from scratch, in the order in
#: which they are drawn; dense weights are (in, out)
LENET: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("W1", (20, 1, 3, 3)), ("b1", (20,)),
    ("W2", (50, 20, 5, 5)), ("b2", (50,)),
    ("W3", (800, 128)), ("b3", (128,)),
    ("W4", (128, 10)), ("b4", (10,)))


def lenet_params(scale: float = 0.01, seed: int = 0, dtype: str = "float32"
                 ) -> list[np.ndarray]:
    """Initial values for `lenet_forward` on the host: weights Normal(0,
    `scale`), biases 0; 129,068 values in 8 arrays. `mgpu.get_params` copies
    them to a device."""
    rule = initializers.Normal(scale)
    return [initializers.draw_parameter(
        "bias" if name[0] == "b" else "weight", shape, dtype, rule,
        seed=seed, index=i) for i, (name, shape) in enumerate(LENET)]


def lenet_forward(X: Any, params: Sequence[Any]) -> Any:
    """The book's LeNet variant from scratch ("Training on Multiple GPUs").

    Parameters
    ----------
    X : native array (n, 1, 28, 28)
    params : sequence of 8 native arrays on the device of `X`

    Returns
    -------
    native array (n, 10)
        Unnormalized scores.
    """
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), 2)
    h = F.avg_pool2d(F.relu(F.conv2d(h, W2, b2)), 2)
    h = h.reshape((len(h), 800))
    h = F.relu(F.dot(h, W3) + b3)
    return F.dot(h, W4) + b4


def lenet(X: Any = None, params: Any = None, *, num_classes: int = 10,
          in_channels: int = 1) -> Any:
    """The book's LeNet variant as a native network of the current backend,
    without values yet (`mgpu.initialize`).

    For 28 x 28 images: two convolutions, each with ReLU and average pooling,
    then two dense layers. ``lenet(X, params)`` is the older spelling of
    `lenet_forward`.

    Raises
    ------
    ValueError
        A number of classes or channels that is not a whole number, 1 or
        more.
    """
    if X is not None:
        return lenet_forward(X, params)
    return _native("lenet", num_classes, in_channels)


def resnet18(num_classes: int = 10, in_channels: int = 1) -> Any:
    """The book's ResNet-18 variant ("Concise Implementation for Multiple
    GPUs") as a native network of the current backend, without values yet
    (`mgpu.initialize`).

    For 28 x 28 images: conv 3x3 to 64 channels, batch norm, ReLU, no
    max-pooling; four groups of two residual blocks with 64, 128, 256, 512
    channels; global average pooling; dense. Convolutions have biases. Both
    backends have the same order, names and shapes of parameters (76 arrays,
    11,175,818 values for one channel and ten classes), and torch's network
    has Gluon's batch-norm arithmetic.

    Raises
    ------
    ValueError
        A number of classes or channels that is not a whole number, 1 or
        more.
    """
    return _native("resnet18", num_classes, in_channels)


def _native(name: str, num_classes: int, in_channels: int) -> Any:
    return get_backend().model(
        name, num_classes=integer("num_classes", num_classes, 1),
        in_channels=integer("in_channels", in_channels, 1))
