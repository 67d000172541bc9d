"""Errors that both backends raise, with one text.

A check returns nothing and raises; the other functions make an exception for
their caller to raise.
"""
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

#: what host data may hold: the dtypes that both backends have
DTYPES = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64",
          "bool")


def host_array(x: Any) -> np.ndarray:
    """A fresh, contiguous NumPy copy of `x`.

    Python floats become float32, the default of both backends; arrays keep
    their dtype.

    Raises
    ------
    TypeError
        NumPy cannot make an array of numbers from `x`.
    ValueError
        A dtype that is not one of `DTYPES`.
    """
    try:
        array = np.array(x, order="C")
    except ValueError:      # rows of different lengths
        array = np.array(None)
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"expected an array of numbers; received {type(x).__name__} "
            "that NumPy cannot make one of. Pass numbers, or rows of one "
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
    """TypeError if `x` is an array of the other framework."""
    root = type(x).__module__.split(".")[0]
    if root in ("mxnet", "torch"):
        raise TypeError(
            f"expected an array of the {backend} backend; received "
            f"{type(x).__module__}.{type(x).__name__}. mgpu converts nothing "
            "between frameworks silently: use mgpu.to_numpy under the other "
            "backend, then mgpu.put.")


def check_native(arrays: Iterable[Any], backend: Any, takes: str,
                 cure: str = "Use mgpu.put(x, device).") -> None:
    """TypeError for what is no array of `backend`; `takes`: who takes them,
    in words."""
    for x in arrays:
        if not backend.is_native(x):
            refuse_foreign(x, backend.name)
            raise TypeError(f"{takes} arrays of the {backend.name} backend; "
                            f"received {type(x).__name__}. {cure}")


def changed_layers(names: Iterable[str]) -> RuntimeError:
    """Layers, parameters or buffers came, went or were replaced."""
    return RuntimeError(
        "a network keeps its layers, and a layer its parameters and buffers, "
        "from initialize on; received others under "
        f"{', '.join(map(repr, names))}. Change them before "
        "mgpu.initialize, or call it again with force_reinit=True and "
        "init='keep', and make a new Trainer.")


def check_by_layer(hybridize: bool, batch_norm: str) -> None:
    """ValueError for "sync" in a compiled network."""
    if hybridize and batch_norm == "sync":
        raise ValueError(
            "synchronized batch normalization needs the layers of the "
            "network one by one; received batch_norm='sync' with hybridize. "
            "Use one of them.")


def own_batch_norm(paths: Iterable[str]) -> ValueError:
    """Batch-norm layers whose forward pass the user has written."""
    return ValueError(
        "batch_norm='sync' computes the layers of the framework; received "
        f"batch-norm layers with a forward pass of their own in {list(paths)}"
        ". Use batch_norm='per_device' or 'average', or the framework's "
        "plain layer.")


def not_joined(what: Iterable[str]) -> ValueError:
    """Layers or functions that normalize each device's rows by themselves,
    under ``batch_norm="sync"``."""
    return ValueError(
        "batch_norm='sync' joins the framework's batch-norm layers; received "
        "what keeps running statistics of each device's rows by itself: "
        f"{list(what)}. Use such layers, track_running_stats=False in "
        "InstanceNorm, batch_norm='per_device', or one device.")


def not_again() -> RuntimeError:
    """A layer of which a checkpoint cannot tell what it has computed."""
    return RuntimeError(
        "with batch_norm='sync' the devices meet in the forward pass only; "
        "received a checkpoint, which computes a layer of batch norm or "
        "dropout again, that is reentrant, or whose layer a pass calls more "
        "than once. Use use_reentrant=False, batch_norm='per_device' or "
        "'average', or leave such layers out of checkpoints.")


def wrong_device(device: Any, actual: Any) -> ValueError:
    """An array on `actual` was given to the replica on `device`. Raised by
    the replicas of both backends when they are called."""
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
    """A gradient was asked for in an array of integers."""
    return ValueError(f"only arrays of floats have gradients; received "
                      f"{dtype}. Use mgpu.functional.astype(x, 'float32').")


def check_grad_req(grad_req: str) -> None:
    """ValueError for anything but "write", "add" and "null"."""
    if grad_req not in ("write", "add", "null"):
        raise ValueError(f"unknown grad_req; received {grad_req!r}. Use "
                         "'write', 'add' or 'null'.")


def no_gradient() -> ValueError:
    """An array without a gradient was asked for it."""
    return ValueError("the array has no gradient attached; use "
                      "mgpu.attach_grad(x) before the forward pass.")


def not_recorded() -> RuntimeError:
    """A loss has no graph to go back through."""
    return RuntimeError(
        "backward needs losses that were computed inside mgpu.record() from "
        "arrays with gradients attached; received one that was not. Put the "
        "forward pass inside `with mgpu.record():`.")


def nested_rendezvous() -> RuntimeError:
    """Functions that wait for each other were started inside another one."""
    return RuntimeError(
        "functions that wait for each other cannot start inside a function "
        "that mgpu.parallel runs; call the replicas together, outside of it.")


def watched_rendezvous(what: Any) -> RuntimeError:
    """Devices wait for each other in their passes, where code of the user's
    sees one device after the other."""
    return RuntimeError(
        "a mode or hook around a step sees one device after the other, and "
        "with batch_norm='sync' they meet in the middle of their passes; "
        f"received {what}. Enter it in the network's forward(), or use "
        "batch_norm='per_device' or 'average', or one device.")


def not_a_network(net: Any, backend: str, expected: str) -> TypeError:
    """`net` is not a network of the backend `backend`."""
    if isinstance(net, type):
        return TypeError(
            f"the {backend} backend takes a {expected}; received the class "
            f"{net.__module__}.{net.__name__}. Make an object of it: "
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
    """The backend has not written an optional method of the contract."""
    return NotImplementedError(f"the {backend} backend has no {what}; {cure}")


def unknown_part(part: Any) -> TypeError:
    """A comparison cannot set the state of a part of an own step."""
    return TypeError(
        "the parts of a step are optimizers, schedules, loss scalers, "
        "averages of the weights, and dictionaries of what is carried from "
        "step to step, so that their state can be set; received "
        f"{type(part).__name__}. Return those that the step changes.")


def compiled(paths: Sequence[str]) -> ValueError:
    """Layers that nothing can look at."""
    return ValueError(
        "a comparison looks at the layers of a network; received one that "
        f"torch.compile has compiled, at {list(paths)} ('': the whole). "
        "Compare it without torch.compile and .compile(), also in the load() "
        "of a source, and compile it where it is used.")


def dropout_inside(paths: Sequence[str]) -> ValueError:
    """Masks that no comparison can draw."""
    return ValueError(
        "both sides must draw the same masks; received dropout= of nn.LSTM "
        f"and nn.MultiheadAttention, which no mask reaches, in {paths}. Use "
        "dropout layers between them, or dropout=0.")


def check_parts(parts: Sequence[Any], optimizers: Sequence[Any],
                averages: Sequence[Any], others: int) -> None:
    """ValueError unless the parts of an own step hold an optimizer, which
    moves weights of the network only (`others`: how many that are not), and
    one average at most."""
    if not optimizers or len(averages) > 1 or others:
        raise ValueError(
            "a step comes with the optimizer that it uses, which moves "
            "weights of the network only, and one average of the weights at "
            f"most; received {[type(part).__name__ for part in parts]}, with "
            f"{len(averages)} averages, and {others} weights that are not "
            "the network's. Return (step, [optimizer, ...]).")


# -- memory and dtypes --------------------------------------------------------

def check_apart(places: Iterable[tuple[Any, int, int]]) -> None:
    """ValueError where two arrays, given by their `Backend.memory`, overlap;
    to be called before they are written."""
    for (space, _, end), (other, begin, _) in pairwise(sorted(places)):
        if begin < end and space == other:
            raise ValueError(
                "arrays that a collective writes must not overlap in memory; "
                "received one array twice, or views that share memory. Copy "
                "one of them with mgpu.put(x, device).")


def no_places(what: str, cure: str) -> ValueError:
    """An array was to be written whose elements have no place of their own
    in memory."""
    return ValueError(
        "an array that is written must have a place in memory for each of "
        f"its elements; received {what}. Use {cure}.")


def check_precision(multi_precision: Any, dtypes: Mapping[str, str]) -> None:
    """Refuse Gluon's float32 copies of narrower weights; `dtypes` by name of
    the parameters."""
    narrow = sorted(name for name, dtype in dtypes.items()
                    if dtype not in ("float32", "float64"))
    if multi_precision and narrow:
        raise ValueError(
            "weights are updated in their own precision; received "
            f"multi_precision=True and narrower weights, {narrow[:4]}. Use a "
            "float32 network (with autocast, on torch), or leave "
            "multi_precision out.")


def sparse_gradient(names: Sequence[str]) -> ValueError:
    """Parameters whose gradients would hold only the rows that were used."""
    return ValueError(
        "gradients must hold all rows of a parameter; received sparse ones "
        f"for {', '.join(map(repr, names))}. Make the layer without "
        "sparse_grad=True (Gluon) or sparse=True (torch): optimizers then "
        "update every row in each step.")


def wrong_dtype(own: str, received: Sequence[str]) -> TypeError:
    """A layer that computes in `own` was given arrays of other dtypes."""
    return TypeError(
        f"a layer takes inputs of its own dtype, {own}; received "
        f"{', '.join(received)}. Convert the data first: "
        f"X.astype('{own}') in NumPy, or mgpu.put(x, device, "
        f"dtype='{own}').")
