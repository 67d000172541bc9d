"""Parameters of a network on several devices, and lists of arrays."""
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu.backends import get_backend, messages
from mgpu.backends.device import Device, as_device, as_devices
from mgpu.backends.network import BUFFERS, STATISTICS, Spec

if TYPE_CHECKING:
    from mgpu.training.replicas import Replicas

__all__ = ["BUFFERS", "Parameter", "STATISTICS", "get_params"]


def get_params(params: Any, device: Any, grad_req: str = "write") -> Any:
    """Copy parameters to a device and attach zero gradients.

    The book's function ("Training on Multiple GPUs"), for networks written
    as functions of their parameters.

    Parameters
    ----------
    params : sequence of arrays, or dict of them
        Native or NumPy; dtypes are kept. Not changed, not shared.
    device : device
    grad_req : {"write", "add", "null"}

    Returns
    -------
    list (or dict with the same keys) of native arrays

    Raises
    ------
    TypeError
        `params` is a single array, or holds an array of the other framework.
    ValueError
        The device is not available, or `grad_req` is unknown.
    """
    backend, (device,) = get_backend(), as_devices([device])
    messages.check_grad_req(grad_req)
    if hasattr(params, "shape"):
        raise TypeError("params must be a list, or a dict, of arrays; "
                        f"received one {type(params).__name__}. Put it in a "
                        "list.")
    with backend.scope(recording=False):
        named = params if isinstance(params, dict) else dict(enumerate(params))
        copies = {name: backend.put(p, device) for name, p in named.items()}
        for p in copies.values():
            backend.attach_grad(p, grad_req)
    return copies if named is params else list(copies.values())


def _multiplier(index: int) -> Any:
    """A settable entry of `Parameter.multipliers`."""
    def set_own(parameter: "Parameter", factor: float) -> None:
        parameter.own_multipliers[index] = factor
    return property(lambda parameter: parameter.multipliers()[index], set_own)


class Parameter:
    """One parameter or buffer of a `Replicas`, on all its devices.

    The methods are those of Gluon's `Parameter`.

    Attributes
    ----------
    name : str
        Its path in the network with Gluon's suffix: ``"3.0.bn1.gamma"``.
    kind : str
        weight, bias, gamma, beta, running_mean, running_var or other.
    grad_req : str
        ``"write"``, ``"add"`` or ``"null"`` (frozen). It may be set when the
        parameter has values, and applies from the next forward pass. Setting
        it raises ValueError for another value, or for a buffer.
    number : int
        The index among the network's parameters and buffers.
    spec : mgpu.backends.network.Spec
        The backend's description.
    lr_mult, wd_mult : float
        Factors of learning rate and weight decay: those of Gluon's own
        Parameter until they are set here.
    """

    def __init__(self, replicas: "Replicas", number: int, spec: Spec):
        self._replicas, self.number, self.spec = replicas, number, spec
        self.name, self.kind = spec.name, spec.kind
        #: lr_mult and wd_mult that have been set here
        self.own_multipliers: dict[int, float] = {}

    @property
    def replicas(self) -> "Replicas":
        """The `Replicas` of this parameter."""
        return self._replicas

    def __repr__(self) -> str:
        return (f"Parameter {self.name} (shape={self.shape}, "
                f"dtype={self.dtype})")

    @property
    def shape(self) -> tuple[int, ...] | None:
        """None until known (deferred or lazy layers)."""
        if self.kind in BUFFERS and self.spec.shape is not None:
            self.refit()
        return self.spec.shape

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    def refit(self) -> None:
        """Update shape and dtype: a forward pass may replace a buffer by one
        of another shape or dtype."""
        x = self._replicas.network.array(self.number)
        if tuple(x.shape) != self.spec.shape:
            spec = self._replicas.network.specs()[self.number]
            self.spec = self.spec._replace(shape=spec.shape, dtype=spec.dtype)

    def multipliers(self) -> tuple[float, float]:
        """`lr_mult` and `wd_mult`."""
        lr_mult, wd_mult = self._replicas.network.multipliers(self.number)
        return (self.own_multipliers.get(0, lr_mult),
                self.own_multipliers.get(1, wd_mult))

    lr_mult = _multiplier(0)
    wd_mult = _multiplier(1)

    @property
    def grad_req(self) -> str:
        return self._replicas.network.grad_req(self.number)

    @grad_req.setter
    def grad_req(self, grad_req: str) -> None:
        messages.check_grad_req(grad_req)
        if self.kind in BUFFERS and grad_req != "null":
            raise ValueError(
                f"a buffer has no gradient; received grad_req={grad_req!r} "
                f"for {self.name!r} ({self.kind}). Set it for parameters: "
                "see Replicas.params().")
        self._replicas.check_complete()
        self._replicas.network.set_grad_req(self.number, grad_req)

    def list_devices(self) -> list[Device]:
        return list(self._replicas.devices)

    #: Gluon's name
    list_ctx = list_devices

    def list_data(self) -> list[Any]:
        """Return the network's own native array, then a copy for each other
        device, which the next pass overwrites. A copy has the network's
        value; for a running statistic, the device's own."""
        self._replicas.check_complete()
        return self._replicas.network.arrays(self.number)

    def list_grad(self) -> list[Any]:
        """Return the network's own gradient, the sum over all devices, then a
        copy on each other device. Raises ValueError for a frozen parameter or
        a buffer."""
        return [self.grad(device) for device in self._replicas.devices]

    def data(self, device: Any = None, *, ctx: Any = None) -> Any:
        """Return the network's own array; on another device than the first,
        the array of `list_data`. `ctx` is Gluon's name for `device`.

        Raises
        ------
        RuntimeError
            The parameter is not on that device, or has no values yet.
        """
        index = self.device_index(device if ctx is None else ctx)
        if index:
            return self.list_data()[index]
        self._replicas.check_complete()
        return self._replicas.network.array(self.number)

    def grad(self, device: Any = None, *, ctx: Any = None) -> Any:
        """Return the gradient, on another device than the first a copy.
        Raises as `data` and `list_grad` do."""
        index = self.device_index(device if ctx is None else ctx)
        if self.grad_req == "null":
            raise ValueError(
                f"parameter {self.name!r} has no gradient; its grad_req is "
                "'null' (a frozen parameter or a buffer). Set grad_req = "
                "'write' on a parameter before the forward pass.")
        backend = self._replicas.backend
        own = backend.grad(self.data())
        if not index:
            return own
        with backend.scope(recording=False):
            return backend.put(own, self._replicas.devices[index])

    def device_index(self, device: Any) -> int:
        """The index of `device` among this parameter's devices (None: the
        first). Raises RuntimeError for another device."""
        if device is None:
            return 0
        device, holders = as_device(device), self._replicas.devices
        if device not in holders:
            raise RuntimeError(
                f"parameter {self.name!r} is not initialized on {device}; it "
                f"is on {holders}. Read it there, or initialize the "
                f"network on devices that include {device}.")
        return holders.index(device)

    def set_data(self, value: Any) -> None:
        """Write `value` (NumPy or native, of this shape) to the network, cast
        to the parameter's dtype. Raises ValueError for another shape; nothing
        has changed."""
        self._replicas.check_complete()
        if not hasattr(value, "shape"):
            value = np.array(value)
        if tuple(value.shape) != self.shape:
            raise ValueError(
                f"parameter {self.name!r} has shape {self.shape}; received "
                f"{tuple(value.shape)}. Reshape the value.")
        with self._replicas.backend.scope(recording=False):
            self.write(value)

    def write(self, value: Any) -> None:
        """Write `value`, of this shape or, for a buffer, with an additional
        leading axis of the devices. Requires a scope that does not record."""
        backend, network = self._replicas.backend, self._replicas.network
        x = network.array(self.number)
        if len(value.shape) > len(x.shape):
            if self.kind in STATISTICS:
                network.write_statistics(self.number, [
                    backend.put(one, device, dtype=self.dtype)
                    for one, device in zip(value, self._replicas.devices,
                                           strict=True)])
                return
            value = value[0]
        x[...] = backend.put(value, x)
        network.written(self.number)

    def zero_grad(self) -> None:
        """Set the gradient to zero."""
        if self.grad_req == "null":
            return
        backend, x = self._replicas.backend, self.data()
        with backend.scope(recording=False):
            if backend.has_gradient(x):
                backend.grad(x)[...] = 0
        backend.mark_used(x)

    def put_grad(self, value: np.ndarray, used: bool) -> None:
        """Write the gradient; with `used` it counts as applied, else as that
        of a new backward pass."""
        backend, x = self._replicas.backend, self.data()
        with backend.scope(recording=False):
            backend.grad(x)[...] = backend.put(value, x)
        backend.mark_used(x, used)
