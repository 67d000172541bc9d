"""Names of Gluon on `Replicas` and `Trainer`, and its functions."""
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu import gluon_io
from mgpu.backends import Backend, get_backend, messages
from mgpu.backends.device import Device, as_devices
from mgpu.backends.network import BUFFERS
from mgpu.utils.arguments import is_number, number, one_of
from mgpu.utils.files import FilePath

if TYPE_CHECKING:
    from mgpu.training.replicas import Replicas  # noqa: F401

#: stores of one process, which give the same sums
_STORES = ("device", "local", "local_update_cpu", "local_allreduce_cpu",
           "local_allreduce_device")
#: families whose constructor in Gluon hands a default rate on, which replaces
#: the base_lr of a schedule (`adamw` is no optimizer there: it is adam's)
_OWN_RATE = ("adam", "adamw", "adamax", "lamb", "nadam", "rmsprop", "signum")


class Parameters(Mapping):
    """Parameters and buffers of a `Replicas` by name, as Gluon's
    ParameterDict: what `Replicas.collect_params` returns.

    A mapping of str to `Parameter`, in the order of the network.
    """

    def __init__(self, parameters: Sequence[Any]):
        self._by_name = {p.name: p for p in parameters}

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        lines = "".join(f"  {p!r}\n" for p in self._by_name.values())
        return f"Parameters (\n{lines})"

    def list_ctx(self) -> list[Device]:
        """The devices that hold them."""
        return next((p.list_devices() for p in self._by_name.values()), [])

    def zero_grad(self) -> None:
        """Set their gradients to zero, those of frozen ones
        and buffers aside, which have none."""
        for p in self._by_name.values():
            p.zero_grad()

    def setattr(self, name: str, value: Any) -> None:
        """Set ``grad_req``, ``lr_mult`` or ``wd_mult`` of each parameter;
        buffers have none of them. AttributeError for another name."""
        if name not in ("grad_req", "lr_mult", "wd_mult"):
            raise AttributeError(
                "grad_req, lr_mult and wd_mult of parameters are set; "
                f"received {name!r}. Other attributes are those of the "
                "network: see replicas.net.")
        if name != "grad_req":      # whose word the first one checks
            number(name, value)
        for p in self._by_name.values():
            if p.kind not in BUFFERS:
                setattr(p, name, value)


def collect_params(replicas: "Replicas", select: str | None = None
                   ) -> Parameters:
    """Parameters and buffers by name, as Gluon's ``collect_params``.

    Parameters
    ----------
    select : str, optional
        A regular expression that a name matches from its beginning:
        ``".*weight|.*bias"``. Names are mgpu's, paths such as
        ``"0.weight"``, the same on both backends, and not Gluon's
        ``dense0_weight``.

    Raises
    ------
    ValueError
        It matches none of the names, which are listed.
    re.error
        No regular expression.
    """
    every = replicas.all_parameters()
    if select is None:
        return Parameters(every)
    found = [p for p in every if re.match(select, p.name)]
    if not found:
        raise ValueError(
            "select matches names of parameters from their beginning; "
            f"received {select!r}, which matches none of "
            f"{[p.name for p in every]}. These are paths, as in "
            "'0.weight', not Gluon's 'dense0_weight'.")
    return Parameters(found)


def save_parameters(replicas: "Replicas", filename: FilePath,
                    deduplicate: bool = False) -> None:
    """Write all values in Gluon's format, whole or not at all.

    `load_parameters` reads the file on either backend, and so does
    ``net.load_parameters`` of a Gluon network with the same layers: its
    names are mgpu's, which are Gluon's paths. Counters that only torch
    has are left out. Values are those of `export_numpy`.

    Parameters
    ----------
    filename : str or os.PathLike
    deduplicate : bool
        Write what several layers share once, not under each name.
    """
    values = {name: x for name, x in replicas.export_numpy().items()
              if not name.endswith("num_batches_tracked")}
    if not deduplicate:
        for first, *others in replicas.network.aliases().values():
            values |= {name: values[first] for name in others
                       if first in values}
    gluon_io.save_params(filename, values)


def load_parameters(replicas: "Replicas", filename: FilePath, ctx: Any = None,
                    allow_missing: bool = False,
                    ignore_extra: bool = False, cast_dtype: bool = False,
                    dtype_source: str = "current") -> None:
    """Read a file of `save_parameters`, or of Gluon's, onto all devices.

    Parameters
    ----------
    filename : str or os.PathLike
    ctx : devices, optional
        Must be those of the replicas.
    allow_missing : bool
        Keep the values of parameters that the file does not have.
    ignore_extra : bool
        Ignore names that the network does not have.
    cast_dtype : bool
        Cast to the dtype of each parameter. If False, another dtype in the
        file raises.
    dtype_source : "current"
        Parameters keep their dtype. "saved" is not supported.

    Raises
    ------
    ValueError
        The file does not fit the network; the message lists all differences.
        Nothing has changed.
    mgpu.gluon_io.UnreadableParams, OSError
        The file cannot be read, or does not exist.
    RuntimeError
        A shape is unknown until the first forward pass.
    """
    if ctx is not None and set(as_devices(ctx)) != set(replicas.devices):
        raise ValueError(
            "replicas stay on their devices; received ctx="
            f"{as_devices(ctx)} for {replicas.devices}. Leave ctx out, or "
            "mgpu.initialize the network on those.")
    one_of("dtype_source", dtype_source, ("current",))
    loaded = gluon_io.load_params(filename)
    if not isinstance(loaded, dict):
        raise ValueError("a file of parameters has names; received "
                         f"{str(filename)!r} without. Write it with "
                         "save_parameters.")
    values = {re.sub("^(arg|aux):", "", name): x
              if isinstance(x, np.ndarray) else x.to_dense()
              for name, x in loaded.items()}
    if not replicas.complete:
        replicas.network.give_shapes({
            name: x.shape for name, x in values.items()})
        replicas.complete_values()
    replicas.fit_numpy(values, allow_missing=allow_missing,
                       ignore_extra=ignore_extra, cast_dtype=cast_dtype)()


def hybridize(replicas: "Replicas", active: bool = True, **options: Any
              ) -> None:
    """Compile the passes to come, as ``initialize(hybridize=True)``, or
    no longer.

    Parameters
    ----------
    active : bool
    **options
        Gluon's ``static_alloc``, ``static_shape``, ``inline_limit`` and
        sizes of bulks, which change no number: not read.

    Raises
    ------
    ValueError, RuntimeError
        As `initialize` with ``hybridize=True``.
    """
    one_of("active", active, (True, False))
    replicas.check_valid()
    messages.check_by_layer(active, replicas.batch_norm)
    replicas.network.hybridize(bool(active), replicas.devices)


def clip(backend: Backend, arrays: Sequence[Any], max_norm: float,
         divisor: float = 1.0, eps: float = 1e-8, nonfinite: str = "raise"
         ) -> float:
    """Scale arrays in place so that their joint norm, divided by `divisor`,
    is `max_norm` at most. Returns the norm before, for which it waits. One
    that is not finite raises FloatingPointError, or leaves the arrays as they
    are (`nonfinite` "skip"), or is used ("ignore")."""
    with backend.scope(recording=False):
        squares = []
        for g in arrays:
            if not re.search("float(32|64)", str(g.dtype)):
                # A sum of squares in float16 ends at a norm of 256.
                g = backend.ops.astype(g, "float32")
            squares.append(backend.ops.sum(g * g))
        norm = math.sqrt(sum(float(backend.to_numpy(s).sum())
                             for s in squares)) / divisor
        if not math.isfinite(norm) and nonfinite != "ignore":
            if nonfinite == "skip":
                return norm
            raise FloatingPointError(
                f"the gradients have norm {norm}; they were not clipped. "
                "Lower the learning rate, or find the step that made them.")
        scale = max_norm / (norm + eps)
        if not scale >= 1:
            for g in arrays:
                g *= scale
    return norm


def clip_global_norm(arrays: Sequence[Any], max_norm: float,
                     check_isfinite: bool = True) -> Any:
    """Scale arrays in place so that their joint norm is `max_norm` at most.

    Gluon's function: ``scale = max_norm / (norm + 1e-8)`` where that is
    below 1. Each array counts: where copies of a gradient lie on several
    devices, give those of one, between `Trainer.allreduce_grads` and
    `update`, or call `Trainer.clip_global_norm`.

    Parameters
    ----------
    arrays : sequence of native arrays
        On any devices; changed in place.
    max_norm : float
    check_isfinite : bool
        Raise for a norm that is not finite. If False, the arrays are scaled
        by the formula's result.

    Returns
    -------
    float
        The norm before clipping; reading it waits. With
        ``check_isfinite=False`` a native array of shape (1,) on the first
        array's device, as Gluon's.

    Raises
    ------
    FloatingPointError
        The norm is NaN or infinite, and nothing has changed. (Gluon warns,
        and scales with an undefined result.)
    TypeError
        `arrays` is not a list of native arrays.
    ValueError
        `arrays` is empty, or `max_norm` is not a finite number above 0.
    """
    backend = get_backend()
    if not isinstance(arrays, (list, tuple)) or not all(
            backend.is_native(x) and "float" in str(x.dtype) for x in arrays):
        raise TypeError(
            f"arrays is a list of native arrays of floats; received "
            f"{[str(getattr(x, 'dtype', type(x))) for x in arrays]}.")
    arrays = [x for x in arrays if math.prod(x.shape)]
    if not arrays:
        raise ValueError("a norm is that of one array or more; received "
                         "none.")
    if not number("max_norm", max_norm) > 0:
        raise ValueError(f"max_norm is above 0; received {max_norm!r}.")
    norm = clip(backend, arrays, max_norm,
                nonfinite="raise" if check_isfinite else "ignore")
    if check_isfinite:
        return norm
    wide = "float64" in str(arrays[0].dtype)
    return backend.put(np.array([norm]), arrays[0],
                       dtype="float64" if wide else "float32")


def check_store(kvstore: Any, compression_params: Any) -> None:
    """Raise ValueError for stores that would change the results, and for
    those that mgpu replaces by another option."""
    if getattr(kvstore, "type", kvstore) not in (None, *_STORES):
        raise ValueError(
            f"unknown kvstore; received {kvstore!r}. Omit it: a Trainer "
            "sums by allreduce= (on GPUs 'native' is the library's own "
            "collective), and over the ranks that mgpu.distributed.init() "
            "joins and mgpu launch starts (--comm kvstore is MXNet's "
            "server).")
    if compression_params is not None:
        raise ValueError(
            "compressed gradients are not supported; received "
            f"compression_params={compression_params!r}. Omit it.")


def rule_options(family: Any, options: Mapping[str, Any],
                 dtypes: Mapping[str, str]) -> tuple[float, dict[str, Any]]:
    """Gluon's rescale_grad (1 by default), and the options of the rule."""
    rest = dict(options)
    scale = rest.pop("rescale_grad", 1.0)
    if not is_number(scale) or not 0 < scale < float("inf"):
        raise ValueError("rescale_grad must be a finite number above 0; "
                         f"received {scale!r}.")
    messages.check_precision(rest.pop("multi_precision", False), dtypes)
    if str(family).lower() in ("sgd", "adam") \
            and isinstance(rest.get("lazy_update"), bool):
        del rest["lazy_update"]     # of sparse gradients only
    return float(scale), rest


def replaces_base_lr(family: str, given: bool) -> bool:
    """Whether Gluon's optimizer writes its rate into its schedule, where the
    rate was `given` or is the default."""
    return family != "ftrl" and (given or family in _OWN_RATE)
