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
    """All values by name, as NumPy copies; waits for pending work.

    Parameters
    ----------
    device : device, optional
        Take the running statistics of this device.
    all_devices : bool
        Keep every device's running statistics: with more than one device
        their arrays get a leading axis of length K. What a checkpoint of
        a run with ``batch_norm="per_device"`` needs. Not with `device`.

    Returns
    -------
    dict of str -> ndarray
        By default the network's own values.

    Raises
    ------
    ValueError
        `device` and `all_devices` together.
    RuntimeError
        A device where the network is not, no values yet, or replicas
        that another `initialize` has made void.
    """
    replicas.check_valid()
    if device is not None and all_devices:
        raise ValueError("one device's statistics or those of all are "
                         f"exported; received device={device!r} and "
                         "all_devices=True. Give one of them.")
    values = {}
    for p in replicas.all_parameters():
        every = p.list_data() if all_devices and len(replicas) > 1 \
            and p.kind in STATISTICS else [p.data(device)]
        found = list(map(replicas.backend.to_numpy, every))
        values[p.name] = np.stack(found) if len(found) > 1 else found[0]
    return values


def import_numpy(replicas: "Replicas", values: Mapping[str, np.ndarray]
                 ) -> None:
    """Write values by name to the network: what `export_numpy` gave, of
    this backend or of the other one, each read once. Buffers may have a
    leading axis of length K. A parameter of several layers may come under
    each of its names. Those of kind "other" may be missing, and
    the gamma and beta of a norm layer that learns none: ones and zeros.

    Raises
    ------
    ValueError
        Missing or unknown names, other shapes, values that are not
        numbers, or finite ones that the parameter's dtype would make
        infinite; all of them are listed. Nothing has changed then.
    RuntimeError
        Replicas that another `initialize` has made void.
    """
    replicas.fit_numpy(values)()


def fit_numpy(replicas: "Replicas", values: Mapping[str, np.ndarray], *,
              allow_missing: bool = False, ignore_extra: bool = False,
              cast_dtype: bool = True) -> Callable[[], None]:
    """A function that does what `import_numpy` of `values` would do now, and
    refuses nothing; raises as that does.

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
            + "; ".join(wrong) + ". Use what export_numpy of a network "
            "with the same layers gave.")

    def write() -> None:
        with backend.scope(recording=False):
            for name, value in known.items():
                own[name].write(value)
    return write


def _changes_nothing(replicas: "Replicas", name: str, value: np.ndarray
                     ) -> bool:
    """Whether it is a counter, which the other backend may have, or a gamma of
    ones, or a beta of zeros, of a norm layer that has none here."""
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
