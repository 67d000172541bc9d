"""Names of PyTorch on `Replicas` and `Trainer`."""
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from mgpu.backends.base import BUFFERS

if TYPE_CHECKING:
    from mgpu.backends import base
    from mgpu.trainer import Trainer

_DTYPE = "mgpu.initialize(net, devices, dtype=...)"
#: names of a Module that `Replicas` does not have, and what to use
TORCH_HINTS = {
    **dict.fromkeys(("half", "float", "double", "bfloat16", "type"),
                    f"{_DTYPE}, or autocast=, before training"),
    **dict.fromkeys(("cuda", "cpu"), "mgpu.initialize(net, devices), which "
                    "says where a network lives"),
    "to": f"mgpu.initialize(net, devices), and {_DTYPE}",
    **dict.fromkeys(
        ("modules", "named_modules", "children", "named_children", "apply",
         "requires_grad_", "get_submodule", "register_forward_hook",
         "register_forward_pre_hook", "register_buffer"),
        "the same method of replicas.net, the user's network"),
    "device_ids": "replicas.devices"}
#: those that it has, and one replica does not
TORCH_VIEW_HINTS = dict.fromkeys(
    ("train", "eval", "parameters", "named_parameters", "buffers",
     "named_buffers", "state_dict", "load_state_dict", "module", "zero_grad"),
    "the method of the same name of the Replicas, which is for all devices")


class IncompatibleKeys(NamedTuple):
    """What `Replicas.load_state_dict` returns, as torch's does."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class TorchNames:
    """Methods of a torch Module that `mgpu.Replicas` has too."""

    if TYPE_CHECKING:
        backend: base.Backend
        network: base.Network
        net: Any

        def all_parameters(self) -> list[Any]: ...
        def check_valid(self) -> None: ...
        def check_complete(self) -> None: ...
        def write(self, values: Mapping[int, Any]) -> None: ...

    @property
    def module(self) -> Any:
        """`Replicas.net`, under DataParallel's name."""
        return self.net

    def state_dict(self) -> dict[str, Any]:
        """All values of the network by the framework's own names, without a
        prefix: what ``torch.save`` or ``mx.nd.save`` takes, and the network's
        own ``load_state_dict`` or ``load_parameters`` loads. Native arrays,
        which the next step changes; no copies. Running statistics are those
        of the first device (`Replicas.export_numpy` has others).

        RuntimeError before the parameters have values, or if another
        `initialize` has made the replicas void.
        """
        self.check_valid()
        self.check_complete()
        return self.network.state()

    def load_state_dict(self, state_dict: Mapping[str, Any],
                        strict: bool = True) -> IncompatibleKeys:
        """Write values by the framework's own names to the network, rounded
        to the dtypes that are there: what `state_dict` gave, or the network's
        own (on torch by its rules, hooks of the layers included, which a copy
        of the network tries first). Native or, on MXNet, NumPy arrays.
        Gradients and trainers stay as they are.

        Returns
        -------
        IncompatibleKeys
            (missing_keys, unexpected_keys); both empty with `strict`.

        Raises
        ------
        RuntimeError
            Other shapes and, with `strict`, missing or unknown names; all of
            them are listed. Rules of layers that make new parameters. Arrays
            are as they were, then and after an error of a rule's own.
        ValueError
            The network's own array under another name. Nothing has changed.
        TypeError
            No mapping.
        """
        self.check_valid()
        if not isinstance(state_dict, Mapping):
            raise TypeError("load_state_dict takes a dict of arrays; received "
                            f"{type(state_dict).__name__}. Read a file with "
                            "torch.load or mx.nd.load first.")
        self._check_apart(state_dict)
        self.check_complete()
        values, missing, unknown = self.network.fit_state(state_dict, strict)
        self.network.load_state(state_dict, strict)
        self.write(values)
        return IncompatibleKeys(missing, unknown)

    def _check_apart(self, values: Mapping[str, Any]) -> None:
        """Refuse arrays of the network that others are to be written from:
        the engines differ in what they have read by then."""
        backend = self.backend
        own = {name: backend.memory(x)
               for name, x in self.state_dict().items()
               if backend.is_native(x)}     # what a layer adds is none
        for name, x in values.items():
            if name not in own or not backend.is_native(x):
                continue
            here, begin, end = place = backend.memory(x)
            if place == own.get(name):
                continue
            for other, (there, start, stop) in own.items():
                if here == there and begin < stop and start < end:
                    raise ValueError(
                        "load_state_dict takes values of their own; received "
                        f"the network's {other!r} as {name!r}, which changes "
                        "while it is read. Pass copies: {name: x.clone() ...}"
                        " on torch, x.copy() on mxnet.")

    def _named(self, buffers: bool) -> Iterator[tuple[str, Any]]:
        self.check_complete()
        return ((name, p.data()) for name, p in zip(
            self.network.own_names(), self.all_parameters(), strict=True)
            if (p.kind in BUFFERS) is buffers)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """(the framework's own name, native parameter) of the network, each
        once; on MXNet its array. Writes to them hold for all devices in the
        next pass. Their gradients are sums over all devices when a backward
        pass has returned, so any optimizer of them may step."""
        return self._named(False)

    def parameters(self) -> Iterator[Any]:
        """`named_parameters` without the names."""
        return (x for _, x in self._named(False))

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        """(the framework's own name, native buffer) of the network."""
        return self._named(True)

    def train(self, mode: bool = True) -> Self:
        """Set the network's own flags, as ``net.train(mode)`` does: layers in
        eval mode predict in `mgpu.record` too. `mgpu.record` decides whether
        a pass trains, these flags which layers do. On MXNet layers
        have none: nothing changes, and ``mode=False`` is refused
        (NotImplementedError)."""
        self.check_valid()
        if not isinstance(mode, bool):
            raise ValueError("training mode is True or False; received "
                             f"{mode!r}.")
        self.network.set_mode(mode)
        return self

    def eval(self) -> Self:
        """``train(False)``."""
        return self.train(False)


def zero_grad(trainer: "Trainer") -> None:
    """`Replicas.zero_grad`, unless other trainers add gradients up."""
    kept = [p.name for p in trainer.replicas.params()
            if p.grad_req == "add" and not trainer.trains(p)]
    if kept:
        raise ValueError(
            "zero_grad is of all gradients of the network; received "
            f"grad_req='add' of {kept[0]!r}, which this trainer does not "
            "move. Call Replicas.zero_grad(), or p.zero_grad() of each "
            "parameter.")
    trainer.replicas.zero_grad()
