"""The text's two networks, for both engines."""
from typing import Any, List, Sequence, Tuple

import numpy as np

from mgpu import functional as F
from mgpu import initializers
from mgpu.backends import get_backend

#: names and shapes of LeNet's parameters, in the order in which they are
#: drawn; dense weights are (in, out)
LENET: Tuple[Tuple[str, Tuple[int, ...]], ...] = (
    ("W1", (20, 1, 3, 3)), ("b1", (20,)),
    ("W2", (50, 20, 5, 5)), ("b2", (50,)),
    ("W3", (800, 128)), ("b3", (128,)),
    ("W4", (128, 10)), ("b4", (10,)))


def lenet_params(scale: float = 0.01, seed: int = 0, dtype: str = "float32"
                 ) -> List[np.ndarray]:
    """Initial values of `lenet` on the host: weights Normal(0, `scale`),
    biases 0; 129,068 values in 8 arrays. `mgpu.get_params` brings them to a
    device."""
    rule = initializers.Normal(scale)
    return [initializers.draw_parameter(
        "bias" if name[0] == "b" else "weight", shape, dtype, rule,
        seed=seed, index=i) for i, (name, shape) in enumerate(LENET)]


def lenet(X: Any, params: Sequence[Any]) -> Any:
    """The text's LeNet variant ("Training on Multiple GPUs").

    Parameters
    ----------
    X : native array (n, 1, 28, 28)
    params : sequence of 8 native arrays on the device of `X`

    Returns
    -------
    native array (n, 10)
        Unnormalised scores.
    """
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), 2)
    h = F.avg_pool2d(F.relu(F.conv2d(h, W2, b2)), 2)
    h = h.reshape((len(h), 800))
    h = F.relu(F.dot(h, W3) + b3)
    return F.dot(h, W4) + b4


def resnet18(num_classes: int = 10, in_channels: int = 1) -> Any:
    """The text's ResNet-18 variant ("Concise Implementation"), as a native
    network of the current backend, without values yet (`mgpu.initialize`).

    For 28 x 28 images: conv 3x3 to 64 channels, batch norm, ReLU, no
    max-pooling; four stages of two residual blocks with 64, 128, 256, 512
    channels; global average pooling; dense. Convolutions have biases. Both
    engines have the same order, names and shapes of parameters (76 arrays,
    11,175,818 values for one channel and ten classes), and torch's twin has
    Gluon's batch-norm arithmetic.
    """
    for name, n in (("num_classes", num_classes),
                    ("in_channels", in_channels)):
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) \
                or n < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more; "
                             f"received {n!r}.")
    return get_backend().resnet18(int(num_classes), int(in_channels))
