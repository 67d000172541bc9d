"""Errors with the same message on both backends.

Checks raise; the other functions return an exception.
"""
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

#: dtypes of host data, which both backends support
DTYPES = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64",
          "bool")


def host_array(x: Any) -> np.ndarray:
    """Copy `x` to a contiguous NumPy array.

    Python floats become float32, the default of both backends. Arrays keep
    their dtype.

    Raises
    ------
    TypeError
        `x` cannot be converted to an array of numbers.
    ValueError
        The dtype is not one of `DTYPES`.
    """
    try:
        array = np.array(x, order="C")
    except ValueError:      # nested lists of different lengths
        array = np.array(None)
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"expected an array of numbers; received {type(x).__name__} "
            "that NumPy cannot convert. Pass numbers, or lists of one "
            "length.")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.name not in DTYPES:
        wide = "int64" if array.dtype.kind in "iu" else "float64"
        raise unknown_dtype(
            array.dtype.name, f"Convert the data: x.astype({wide!r}).")
    if array.dtype == np.float64 and not isinstance(x, (np.ndarray,
                                                        np.generic)):
        array = array.astype(np.float32)
    return array


def refuse_foreign(x: Any, backend: str) -> None:
    """Raise TypeError if `x` is an array of the other framework."""
    root = type(x).__module__.split(".")[0]
    if root in ("mxnet", "torch"):
        raise TypeError(
            f"expected an array of the {backend} backend; received "
            f"{type(x).__module__}.{type(x).__name__}. mgpu converts nothing "
            "between frameworks silently: use mgpu.to_numpy under the other "
            "backend, then mgpu.put.")


def check_native(arrays: Iterable[Any], backend: Any, takes: str,
                 cure: str = "Use mgpu.put(x, device).") -> None:
    """Raise TypeError if an object is not an array of `backend`. `takes`
    starts the message, with the function or argument."""
    for x in arrays:
        if not backend.is_native(x):
            refuse_foreign(x, backend.name)
            raise TypeError(f"{takes} arrays of the {backend.name} backend; "
                            f"received {type(x).__name__}. {cure}")


def changed_layers(names: Iterable[str]) -> RuntimeError:
    """Layers, parameters or buffers were added, removed or replaced."""
    return RuntimeError(
        "the layers, parameters and buffers of a network must not be replaced "
        f"after initialize; received others under "
        f"{', '.join(map(repr, names))}. Change them before "
        "mgpu.initialize, or call it again with force_reinit=True and "
        "init='keep', and create a new Trainer.")


def check_by_layer(hybridize: bool, batch_norm: str) -> None:
    """Raise ValueError for "sync" in a compiled network."""
    if hybridize and batch_norm == "sync":
        raise ValueError(
            "batch_norm='sync' does not support hybridize. Use one of them.")


def own_batch_norm(paths: Iterable[str]) -> ValueError:
    """Batch-norm layers with a user-defined forward."""
    return ValueError(
        "batch_norm='sync' supports the framework's batch-norm layers; "
        f"received layers with a user-defined forward in {list(paths)}. Use "
        "batch_norm='per_device' or 'average', or the framework's layer.")


def not_joined(what: Iterable[str]) -> ValueError:
    """Layers or functions with running statistics for each device, under
    ``batch_norm="sync"``."""
    return ValueError(
        "batch_norm='sync' supports the framework's batch-norm layers; "
        "received layers or functions with other running statistics: "
        f"{list(what)}. Use such layers, track_running_stats=False in "
        "InstanceNorm, batch_norm='per_device', or one device.")


def not_again() -> RuntimeError:
    """A checkpoint whose recomputation is not supported."""
    return RuntimeError(
        "with batch_norm='sync', layers of batch norm or dropout must not be "
        "in a checkpoint that is reentrant, or whose layers a pass calls more "
        "than once; received one. Use use_reentrant=False, "
        "batch_norm='per_device' or 'average', or exclude such layers from "
        "checkpoints.")


def wrong_device(device: Any, actual: Any) -> ValueError:
    """The replica on `device` was called with an array on `actual`."""
    return ValueError(
        f"the replica on {device} takes arrays on {device}; received one on "
        f"{actual}. Use mgpu.put(x, {device}) or mgpu.split_and_load.")


def not_native(x: Any, backend: str) -> TypeError:
    """`x` is not an array of the backend `backend`."""
    refuse_foreign(x, backend)
    return TypeError(f"expected an array of the {backend} backend; received "
                     f"{type(x).__name__}. Use mgpu.put(x, device).")


def unknown_dtype(dtype: Any, cure: str = "Use a name such as 'float32' or "
                                          "'float64'.") -> ValueError:
    """`dtype` is not one of `DTYPES`."""
    return ValueError(f"unknown dtype; received {dtype!r}. {cure}")


def no_float(dtype: Any) -> ValueError:
    """A gradient was requested for an array of integers."""
    return ValueError(f"only arrays of floats have gradients; received "
                      f"{dtype}. Use mgpu.functional.astype(x, 'float32').")


def check_grad_req(grad_req: str) -> None:
    """Raise ValueError unless `grad_req` is "write", "add" or "null"."""
    if grad_req not in ("write", "add", "null"):
        raise ValueError(f"unknown grad_req; received {grad_req!r}. Use "
                         "'write', 'add' or 'null'.")


def no_gradient() -> ValueError:
    """An array has no gradient."""
    return ValueError("the array has no gradient attached; use "
                      "mgpu.attach_grad(x) before the forward pass.")


def not_recorded() -> RuntimeError:
    """A loss was not recorded."""
    return RuntimeError(
        "backward needs losses that were computed inside mgpu.record() from "
        "arrays with gradients attached; received one that was not. Put the "
        "forward pass inside `with mgpu.record():`.")


def nested_rendezvous() -> RuntimeError:
    """Functions that wait for each other were started in a thunk."""
    return RuntimeError(
        "functions that wait for each other cannot start inside a function "
        "of mgpu.parallel. Call the replicas together, outside of it.")


def watched_rendezvous(what: Any) -> RuntimeError:
    """User code observes the devices one by one, while synchronized batch
    norm needs them in parallel."""
    return RuntimeError(
        "batch_norm='sync' does not support a mode or hook around a step; "
        f"received {what}. Enter it in the network's forward(), or use "
        "batch_norm='per_device' or 'average', or one device.")


def not_a_network(net: Any, backend: str, expected: str) -> TypeError:
    """`net` is not a network of the backend `backend`."""
    if isinstance(net, type):
        return TypeError(
            f"the {backend} backend takes a {expected}; received the class "
            f"{net.__module__}.{net.__name__}. Create an instance: "
            f"{net.__name__}(...).")
    roots = {cls.__module__.partition(".")[0] for cls in type(net).__mro__}
    other = next((name for name in ("mxnet", "torch") if name in roots), None)
    return TypeError(
        f"the {backend} backend takes a {expected}; received "
        f"{type(net).__module__}.{type(net).__name__}." + (
            f" Call mgpu.set_backend({other!r}), or choose no backend: the "
            "network decides." if other else ""))


def not_supported(backend: str, what: str, cure: str = "use another backend "
                  "for it.") -> NotImplementedError:
    """The backend does not implement an optional method."""
    return NotImplementedError(f"the {backend} backend has no {what}; {cure}")


def unknown_part(part: Any) -> TypeError:
    """An object of a custom training step whose state cannot be set."""
    return TypeError(
        "the parts of a step must be optimizers, schedules, loss scalers, "
        "averages of the weights, or dictionaries of state; received "
        f"{type(part).__name__}. Return those that the step changes.")


def compiled(paths: Sequence[str]) -> ValueError:
    """Layers that are compiled, and so not accessible."""
    return ValueError(
        "a comparison needs access to the layers of a network; received "
        f"layers compiled by torch.compile, at {list(paths)} ('': the whole "
        "network). Compare it without torch.compile and .compile(), also in "
        "the load() of a source.")


def dropout_inside(paths: Sequence[str]) -> ValueError:
    """Dropout whose masks cannot be set."""
    return ValueError(
        "both models must use the same dropout masks; received dropout= of "
        f"nn.LSTM and nn.MultiheadAttention, which have no masks, in {paths}."
        " Use dropout layers between them, or dropout=0.")


def check_parts(parts: Sequence[Any], optimizers: Sequence[Any],
                averages: Sequence[Any], others: int) -> None:
    """Raise ValueError unless a custom step has optimizers of the network's
    weights only (`others`: number of other weights), and at most one
    average."""
    if not optimizers or len(averages) > 1 or others:
        raise ValueError(
            "a step needs its optimizer, which updates weights of the network "
            "only, and at most one average of the weights; received "
            f"{[type(part).__name__ for part in parts]}, with "
            f"{len(averages)} averages and {others} weights that are not "
            "the network's. Return (step, [optimizer, ...]).")


# -- memory and dtypes --------------------------------------------------------

def check_apart(places: Iterable[tuple[Any, int, int]]) -> None:
    """Raise ValueError if arrays, given by their `Backend.memory`, overlap.
    Called before they are written."""
    for (space, _, end), (other, begin, _) in pairwise(sorted(places)):
        if begin < end and space == other:
            raise ValueError(
                "arrays that a collective writes must not overlap in memory; "
                "received one array twice, or views that share memory. Copy "
                "one of them with mgpu.put(x, device).")


def no_places(what: str, cure: str) -> ValueError:
    """An output array with elements that share memory."""
    return ValueError(
        "the elements of an array that is written must not share memory; "
        f"received {what}. Use {cure}.")


def check_precision(multi_precision: Any, dtypes: Mapping[str, str]) -> None:
    """Raise ValueError for Gluon's float32 copies of weights in reduced
    precision. `dtypes`: by parameter name."""
    narrow = sorted(name for name, dtype in dtypes.items()
                    if dtype not in ("float32", "float64"))
    if multi_precision and narrow:
        raise ValueError(
            "multi_precision=True is not supported for weights in reduced "
            f"precision; received {narrow[:4]}. Use a float32 network (with "
            "autocast, on torch), or omit multi_precision.")


def sparse_gradient(names: Sequence[str]) -> ValueError:
    """Parameters with sparse gradients."""
    return ValueError(
        "sparse gradients are not supported; received them for "
        f"{', '.join(map(repr, names))}. Create the layer without "
        "sparse_grad=True (Gluon) or sparse=True (torch): optimizers then "
        "update every row in each step.")


def wrong_dtype(own: str, received: Sequence[str]) -> TypeError:
    """A layer of dtype `own` received arrays of other dtypes."""
    return TypeError(
        f"a layer takes inputs of its own dtype, {own}; received "
        f"{', '.join(received)}. Convert the data first: "
        f"X.astype('{own}') in NumPy, or mgpu.put(x, device, "
        f"dtype='{own}').")
