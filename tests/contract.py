"""What the tests of the contract (`test_contract*.py`) share."""
import numpy as np

from mgpu import cpu


def leaf(backend, values, device=cpu(0), grad_req="write"):
    """A float64 array with a gradient attached."""
    x = backend.put(np.array(values, dtype=np.float64), device)
    backend.attach_grad(x, grad_req)
    return x


def recording(backend):
    return backend.scope(recording=True, training=True)


def gradient(backend, x):
    return backend.to_numpy(backend.grad(x)).tolist()


def flags(backend):
    return backend.is_recording(), backend.is_training()


def modes(backend):
    """The framework's own per-thread and process-wide modes."""
    if backend.name == "torch":
        import torch
        return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
                torch.get_default_dtype())
    import mxnet as mx
    return (mx.npx.is_np_array(), mx.npx.is_np_shape(),
            mx.autograd.is_recording(), mx.autograd.is_training())
