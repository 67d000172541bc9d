"""Values of parameters by name, as NumPy arrays."""
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu.backends import messages
from mgpu.training.parameters import BUFFERS, STATISTICS
from mgpu.utils.arguments import by_name

if TYPE_CHECKING:
    from mgpu.training.replicas.replicas import Replicas


def export_numpy(replicas: "Replicas", *, device: Any = None,
                 all_devices: bool = False) -> dict[str, np.ndarray]:
    """Export all values by name, as NumPy copies. Waits for pending work.

    Parameters
    ----------
    device : device, optional
        Export the running statistics of this device.
    all_devices : bool
        Export the running statistics of every device: on more than one device
        their arrays have a leading axis of length K. A checkpoint of
        a run with ``batch_norm="per_device"`` needs. Not with `device`.

    Returns
    -------
    dict of str -> ndarray
        Default: the network's own values.

    Raises
    ------
    ValueError
        `device` and `all_devices` are both given.
    RuntimeError
        The network is not on `device`, or has no values yet; or another
        `initialize` has invalidated the replicas.
    """
    replicas.check_valid()
    if device is not None and all_devices:
        raise ValueError("device= exports one device's statistics and "
                         f"all_devices= all; received device={device!r} and "
                         "all_devices=True. Pass one of them.")
    values = {}
    for p in replicas.all_parameters():
        every = p.list_data() if all_devices and len(replicas) > 1 \
            and p.kind in STATISTICS else [p.data(device)]
        found = list(map(replicas.backend.to_numpy, every))
        values[p.name] = np.stack(found) if len(found) > 1 else found[0]
    return values


def import_numpy(replicas: "Replicas", values: Mapping[str, np.ndarray]
                 ) -> None:
    """Write values by name to the network: a result of `export_numpy`, from
    either backend. Each value is read once. Buffers may have a leading axis
    of length K. A shared parameter may have any of its names. Parameters of
    kind "other" may be missing, and so may the gamma (ones) and beta (zeros)
    of a norm layer that does not learn them.

    Raises
    ------
    ValueError
        Missing or unknown names, other shapes, values that are not
        numbers, or finite values that overflow the parameter's dtype. The
        message lists all of them; nothing has changed.
    RuntimeError
        Another `initialize` has invalidated the replicas.
    """
    replicas.fit_numpy(values)()


def fit_numpy(replicas: "Replicas", values: Mapping[str, np.ndarray], *,
              allow_missing: bool = False, ignore_extra: bool = False,
              cast_dtype: bool = True) -> Callable[[], None]:
    """Check `values` as `import_numpy` does, and return a function that
    writes them without raising.

    Parameters
    ----------
    allow_missing, ignore_extra, cast_dtype : bool
        Whether names may be missing, or be unknown, and whether values are
        rounded to the dtypes of the parameters. Otherwise ValueError.
    """
    replicas.check_complete()
    replicas.check_valid()
    backend, k = replicas.backend, len(replicas)
    # Copies: a mapping may read them anew each time, or change.
    values = {
        name: backend.to_numpy(x) if backend.is_native(x) else np.array(x)
        for name, x in by_name("values", values).items()}
    for p in replicas.buffers():    # a pass may have made some larger
        p.refit()
    own = {p.name: p for p in replicas.all_parameters()}
    wrong = []
    if values.keys() - own.keys():
        for first, *others in replicas.network.aliases().values():
            wrong += [f"other values of {name} than of {first}, which are one "
                      "parameter" for name in others if name in values
                      and values.setdefault(first, x := values.pop(name)
                                            ).tobytes() != x.tobytes()]
    for name, p in own.items():
        if p.spec.constant is not None and name not in values \
                and not allow_missing:
            values[name] = np.full(p.shape or (), p.spec.constant)
    wrong += [f"missing {name}" for name, p in own.items()
              if name not in values and p.kind != "other"
              and not allow_missing]
    wrong += [f"unknown {name}" for name, x in values.items()
              if name not in own and not ignore_extra
              and not _changes_nothing(replicas, name, x)]
    known = {name: x for name, x in values.items() if name in own}
    for name, value in known.items():
        p = own[name]
        if value.shape != p.shape and not (
                p.kind in BUFFERS and value.shape == (k, *(p.shape or ()))):
            wrong.append(f"{name}: shape {value.shape} instead of {p.shape}")
        elif not cast_dtype and value.dtype.name != p.dtype:
            wrong.append(f"{name}: {value.dtype} instead of {p.dtype}, where "
                         "cast_dtype=True rounds")
        elif value.dtype.name == p.dtype and value.dtype.kind in "iu":
            known[name] = value.astype("int64")     # uint16, for example
        elif value.dtype.name not in messages.DTYPES:
            wrong.append(f"{name}: dtype {value.dtype}")
        elif _overflows(value, p.dtype):
            wrong.append(f"{name}: values beyond the range of {p.dtype}")
    if wrong:
        raise ValueError(
            "the values must be those of this network; received "
            + "; ".join(wrong) + ". Pass the result of export_numpy of a "
            "network with the same layers.")

    def write() -> None:
        with backend.scope(recording=False):
            for name, value in known.items():
                own[name].write(value)
    return write


def _changes_nothing(replicas: "Replicas", name: str, value: np.ndarray
                     ) -> bool:
    """Whether the value is a counter, which the other backend may have, or
    the initial gamma or beta of a norm layer that has none here."""
    path, _, kind = name.rpartition(".")
    start = {"gamma": 1, "beta": 0}.get(kind)
    return kind == "num_batches_tracked" or start is not None and bool(
        np.all(value == start)) and any(
        layer.path == path and layer.kind.endswith("_norm")
        for layer in replicas.network.layers())


def _overflows(x: np.ndarray, dtype: str) -> bool:
    """Whether `dtype` makes a finite value of `x` infinite."""
    if dtype not in ("float16", "float32"):
        return False
    with np.errstate(over="ignore"):
        return bool((np.isfinite(x) & ~np.isfinite(x.astype(dtype))).any())
