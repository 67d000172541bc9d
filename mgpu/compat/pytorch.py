"""Names of PyTorch on `Replicas` and `Trainer`."""
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mgpu.backends.network import BUFFERS


if TYPE_CHECKING:
    from mgpu.training.replicas import Replicas  # noqa: F401
    from mgpu.training.trainer import Trainer

class IncompatibleKeys(NamedTuple):
    """What `Replicas.load_state_dict` returns, as torch's does."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def state_dict(replicas: "Replicas") -> dict[str, Any]:
    """Return all values of the network under the framework's own names.

    ``torch.save`` or ``mx.nd.save`` writes the result, and the network's own
    ``load_state_dict`` or ``load_parameters`` loads it. Native arrays without
    a copy: the next step changes them. Running statistics are those of the
    first device (`Replicas.export_numpy` has others).

    Raises RuntimeError before the parameters have values, or if another
    `initialize` has invalidated the replicas.
    """
    replicas.check_valid()
    replicas.check_complete()
    return replicas.network.state()


def load_state_dict(replicas: "Replicas", state_dict: Mapping[str, Any],
                    strict: bool = True) -> IncompatibleKeys:
    """Write values by the framework's own names to the network, rounded to
    the dtypes that are there: on torch, the network's own method of this
    name, with what its layers do then; on MXNet, what `state_dict` gave,
    native or NumPy arrays. Gradients and trainers stay as they are.

    Returns
    -------
    IncompatibleKeys
        (missing_keys, unexpected_keys); both empty with `strict`.

    Raises
    ------
    RuntimeError
        Other shapes and, with `strict`, missing or unknown names; all of
        them are listed. Arrays are as they were, then and after an error of
        a layer's own rule.
    TypeError
        No mapping.
    """
    replicas.check_valid()
    if not isinstance(state_dict, Mapping):
        raise TypeError("load_state_dict takes a dict of arrays; received "
                        f"{type(state_dict).__name__}. Read a file with "
                        "torch.load or mx.nd.load first.")
    replicas.check_complete()
    with replicas.exclusive(), replicas.backend.scope(recording=False):
        return IncompatibleKeys(*replicas.network.load_state(state_dict,
                                                             strict))


def _named(replicas: "Replicas", buffers: bool) -> Iterator[tuple[str, Any]]:
    replicas.check_complete()
    return ((name, p.data()) for name, p in zip(
        replicas.network.own_names(), replicas.all_parameters(), strict=True)
        if (p.kind in BUFFERS) is buffers)


def named_parameters(replicas: "Replicas") -> Iterator[tuple[str, Any]]:
    """(the framework's own name, native parameter) of the network, each
    once; on MXNet its array. Writes to them hold for all devices in the
    next pass. Their gradients are sums over all devices when a backward
    pass has returned, so any optimizer of them may step."""
    return _named(replicas, False)


def parameters(replicas: "Replicas") -> Iterator[Any]:
    """`named_parameters` without the names."""
    return (x for _, x in _named(replicas, False))


def named_buffers(replicas: "Replicas") -> Iterator[tuple[str, Any]]:
    """Yield (the framework's own name, native buffer) of the network."""
    return _named(replicas, True)


def train(replicas: "Replicas", mode: bool = True) -> "Replicas":
    """Set the network's own modes, as ``net.train(mode)`` does. `mgpu.record`
    determines whether a pass trains, and these modes which layers train:
    layers in eval mode predict in `mgpu.record` too. On MXNet layers have no
    modes: no effect, and ``mode=False`` raises NotImplementedError."""
    replicas.check_valid()
    if not isinstance(mode, bool):
        raise ValueError("training mode is True or False; received "
                         f"{mode!r}.")
    replicas.network.set_mode(mode)
    return replicas


def eval_(replicas: "Replicas") -> "Replicas":
    """``train(False)``."""
    return train(replicas, False)


def zero_grad(trainer: "Trainer") -> None:
    """`Replicas.zero_grad`, unless other trainers accumulate gradients."""
    kept = [p.name for p in trainer.replicas.params()
            if p.grad_req == "add" and not trainer.trains(p)]
    if kept:
        raise ValueError(
            "zero_grad clears all gradients of the network; received "
            f"grad_req='add' of {kept[0]!r}, which this trainer does not "
            "update. Call Replicas.zero_grad(), or p.zero_grad() of each "
            "parameter.")
    trainer.replicas.zero_grad()
