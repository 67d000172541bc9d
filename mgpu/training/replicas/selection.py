"""Select the parameters that a Trainer updates."""
from collections.abc import Iterator, Sequence
from typing import Any

from mgpu.backends import given
from mgpu.training.parameters import Parameter
from mgpu.training.replicas.replicas import Replicas, initialized, replicas_on


def replicas_of(parameters: Any) -> tuple[Replicas, frozenset[str] | None]:
    """The replicas of the network of `parameters`, and the names of these;
    None: all of the network's.

    Parameters
    ----------
    parameters : Replicas, or a list, an iterator or a dict of parameters
        `Parameter` objects or the framework's own, such as
        ``net.collect_params()`` or ``net.parameters()``.

    Raises
    ------
    TypeError
        `parameters` is of another type.
    ValueError
        No parameter; parameters of networks that mgpu has not initialized, or
        of several networks; a duplicate.
    """
    if isinstance(parameters, Replicas):
        return parameters, None
    if hasattr(parameters, "items"):
        parameters = list(parameters.items())
    every = [x[1] if isinstance(x, tuple) and len(x) == 2 else x
             for x in parameters] if isinstance(
                 parameters, (list, tuple, Iterator)) else [None]
    if not all(isinstance(x, Parameter) or given(x) is not None
               for x in every):
        if hasattr(parameters, "forward"):
            raise TypeError(
                "a Trainer expects the Replicas of a network; received the "
                f"network, a {type(parameters).__name__}. Call replicas = "
                "mgpu.initialize(net, devices), then Trainer(replicas, ...).")
        raise TypeError(
            "a Trainer expects the Replicas that mgpu.initialize returns; "
            f"received {type(parameters).__name__}. Use Trainer(replicas, "
            "...) or Trainer(net.collect_params(), ...) of a network that "
            "mgpu.initialize has put on devices, and for lists of arrays "
            "mgpu.sgd. Parameter groups are not supported: "
            "use lr_mult and wd_mult, or a Trainer for each group.")
    native = [x for x in every if not isinstance(x, Parameter)]
    for net in list(initialized):
        replicas = replicas_on(net)
        names = iter(replicas.network.names_of(native))
        found = [(x.name if x.replicas is replicas else None)
                 if isinstance(x, Parameter) else next(names) for x in every]
        if any(name is not None for name in found):
            return replicas, _trained(replicas, found)
    raise ValueError(
        "a Trainer expects parameters of an initialized network; "
        f"received {len(every)} parameters of none. Call replicas = "
        "mgpu.initialize(net, devices) first, and pass the replicas; "
        "or check the pattern that selects the parameters.")


def _trained(replicas: Replicas, names: Sequence[str | None]
             ) -> frozenset[str] | None:
    """`names` without those of buffers; None: all parameters."""
    twice = sorted({x for x in names if x and names.count(x) > 1})
    if None in names or twice:
        raise ValueError(
            "a Trainer trains one network, each parameter once; received "
            f"{names.count(None)} of {len(names)} parameters that are not "
            f"{type(replicas.net).__name__}'s, and {twice} more than once. "
            "Make a Trainer for each network, or initialize a network that "
            "holds all of them.")
    own = {p.name for p in replicas.params()}
    found = own.intersection(map(str, names))
    if not found:
        raise ValueError("a Trainer requires at least one parameter; received "
                         f"buffers only: {sorted(map(str, names))}.")
    return None if found == own else frozenset(found)
