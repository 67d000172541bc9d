"""Replica 0 is the user's network: what is written to it reaches all."""
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mgpu import host_memory
from mgpu.backends.base import Array, Backend
from mgpu.device import Device
from mgpu.parameters import BUFFERS, STATISTICS, Parameter


class _Known(NamedTuple):
    """One parameter or buffer when mgpu had last written to it."""

    arrays: list[Array]             # one per device
    request: str                    # its grad_req
    marks: list[Any]                # see `Backend.mark`
    contents: bytes | None          # of a buffer of replica 0, if known


class Following:
    """Makes all replicas equal to replica 0 before they are used.

    Parameters are compared bit by bit where NumPy sees their memory: a write
    through ``.data``, or through a NumPy view, leaves no other trace.
    Elsewhere (GPUs) the engine's marks are all there is. Buffers may differ
    by device. They are copied if replica 0's were written to since the last
    pass or step of mgpu.

    Parameters
    ----------
    backend : Backend
    devices : sequence of Device
    adopt : callable
        ``adopt(parameter, earlier)`` is called when the user has put another
        array in the place of replica 0's array `earlier`.
    """

    def __init__(self, backend: Backend, devices: Sequence[Device],
                 adopt: Callable[[Parameter, Array], None]) -> None:
        self._backend, self._devices, self._adopt = backend, devices, adopt
        self._known: dict[str, _Known] = {}
        self._warned = False

    def settle(self, parameters: Sequence[Parameter]) -> None:
        """What was written so far is known; what follows is the user's.
        Waits for buffers."""
        for p in parameters:
            arrays, known = p.list_data(), self._known.get(p.name)
            if known is not None and arrays[0] is not known.arrays[0] \
                    and (arrays[0].shape, arrays[0].dtype) != (
                        known.arrays[0].shape, known.arrays[0].dtype):
                p.refit()       # on one device
            self._known[p.name] = _Known(
                arrays, p.grad_req if known is None else known.request,
                [self._backend.mark(x) for x in arrays],
                self._contents(arrays[0]) if p.kind in BUFFERS else None)

    def settle_request(self, p: Parameter) -> None:
        """What `p` asks for now is asked for on all devices."""
        self._known[p.name] = self._known[p.name]._replace(
            request=p.grad_req)

    def followed(self, p: Parameter) -> tuple[list[Array], str]:
        """The arrays and the grad_req of `p`, as `follow` has left them."""
        return self._known[p.name][:2]

    def passed(self, buffers: Sequence[Parameter], training: bool = True
               ) -> None:
        """A pass, which may write to `buffers`, has been queued. Without
        marks nothing can be told of the user's writes to them after one that
        trains, until `settle`; one that predicts moves no statistics, and is
        waited for where there are others. ValueError for a buffer whose shape
        has changed: devices without rows could not take it over."""
        for p in buffers:
            known = self._known[p.name]
            if known.marks[0] is None and training:
                self._known[p.name] = known._replace(contents=None)
            if known.marks[0] is None and (training or p.kind in STATISTICS):
                continue
            arrays = p.list_data()
            self._known[p.name] = known._replace(
                marks=[self._backend.mark(x) for x in arrays],
                contents=self._contents(arrays[0]))
            if len(arrays) > 1:
                self._check_shapes(p, arrays)

    def agreed(self, parameters: Sequence[Parameter], devices: Sequence[int]
               ) -> None:
        """A pass of `devices` is done. What it has written to parameters, the
        same on each, is no edit of the user's on them."""
        mark = self._backend.mark
        moved = [] if len(self._devices) == 1 else [
            p for p in parameters
            if mark(self._known[p.name].arrays[devices[0]])
            != self._known[p.name].marks[devices[0]]]
        columns = [p.list_data() for p in moved]
        now = [[mark(x) for x in arrays] for arrays in columns]
        for p, marks, differing in zip(moved, now, host_memory.differing(
                self._backend, columns)):
            if differing is None:
                continue
            known = self._known[p.name]
            # Replica 0's is still to reach those that have had no rows.
            own = {i for i in devices if i not in differing
                   and (i or not differing and len(devices) == len(marks))}
            self._known[p.name] = known._replace(marks=[
                new if i in own else old
                for i, (new, old) in enumerate(zip(marks, known.marks))])

    def _check_shapes(self, p: Parameter, arrays: Sequence[Array]) -> None:
        for x, device in zip(arrays, self._devices):
            if tuple(x.shape) != p.shape:
                raise ValueError(
                    f"on several devices buffer {p.name!r} keeps its shape, "
                    f"{p.shape}; received {tuple(x.shape)} on {device}. Make "
                    "it as large as it gets before mgpu.initialize, or keep "
                    "it in a plain attribute, which each device has for "
                    "itself.")

    def written(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        """Those whose arrays of replica 0 were written to, as far as the
        engine or the contents of a buffer tell."""
        return [p for p in parameters
                if self._writes(p, p.list_data()[:1])[0]]

    def moved(self, buffers: Sequence[Parameter], device: int
              ) -> list[Parameter]:
        """Those that a pass that predicts has written on the device of this
        number, which `passed` has not been told of; on engines without
        marks, no statistics."""
        def is_written(p: Parameter) -> bool:
            mark, arrays = self._known[p.name].marks[device], p.list_data()
            if mark is None and (device or p.kind in STATISTICS):
                return p.kind not in STATISTICS
            return self._backend.mark(arrays[device]) != mark if device \
                else self._writes(p, arrays[:1])[0]
        return list(filter(is_written, buffers))

    def standing(self, p: Parameter) -> list[Array]:
        """The arrays of `p`, one per device: replica 0's instead of one that
        is to follow it."""
        first, *others = arrays = p.list_data()
        if self._known[p.name].marks[0] is None:
            return arrays   # nobody knows of writes to the others
        written, *apart = self._writes(p, arrays)
        return [first, *(first if written and not own else x
                         for x, own in zip(others, apart))]

    def _writes(self, p: Parameter, arrays: Sequence[Array]) -> list[bool]:
        """Whether the engine has counted a write to each of the first
        `arrays` of `p`, or a buffer of replica 0 holds other values."""
        known = self._known[p.name]
        written = [self._backend.mark(x) != mark for x, mark
                   in zip(arrays, known.marks)]
        if known.contents is not None and not written[0]:
            # .data, NumPy and torch's batch norm leave no other trace
            written[0] = known.contents != self._contents(arrays[0])
        return written

    def follow_request(self, p: Parameter) -> None:
        """Freeze or unfreeze `p` on all devices as on replica 0."""
        if p.grad_req != self._known[p.name].request:
            p.grad_req = p.grad_req

    def follow(self, parameters: Sequence[Parameter]) -> None:
        """Copy replica 0's values to the replicas that have others.

        Raises
        ------
        RuntimeError
            Only another replica than replica 0 was written to.
        ValueError
            An array of another shape or dtype stands in the place of
            replica 0's.
        """
        columns = [p.list_data() for p in parameters]
        replaced = []
        for p, arrays in zip(parameters, columns):
            known = self._known[p.name]
            if arrays[0] is not known.arrays[0]:
                self._adopt(p, known.arrays[0])
                replaced.append(p)
            self.follow_request(p)      # Gluon freezes by other arrays
        if len(self._devices) == 1:
            self.settle(replaced)
            return
        buffers, weights = (
            [(p, arrays) for p, arrays in zip(parameters, columns)
             if (p.kind in BUFFERS) is kind] for kind in (True, False))
        everywhere: Sequence[int] = range(1, len(self._devices))
        copies = [(p, arrays, everywhere) for p, arrays in buffers
                  if self._writes(p, arrays[:1])[0]]
        copies += [(p, arrays, self._to_copy(p, arrays, found))
                   for (p, arrays), found in zip(
                       weights, host_memory.differing(
                           self._backend, [arrays for _, arrays in weights]))
                   if found != []]
        with self._backend.scope(recording=False):
            for _, arrays, targets in copies:
                for i in targets:
                    arrays[i][...] = self._backend.put(arrays[0], arrays[i])
        self.settle(replaced + [p for p, _, targets in copies if targets])

    def _to_copy(self, p: Parameter, arrays: Sequence[Array],
                 differing: Sequence[int] | None) -> Sequence[int]:
        """The devices that replica 0's parameter is to be copied to.
        `differing`: those that hold other bits; None: it is not known."""
        written = self._writes(p, arrays)
        if differing is None:
            others = range(1, len(arrays))
            if written[0]:
                return others
            differing = [i for i in others if written[i]]
        for i in differing:
            if written[i] and written[0]:
                raise RuntimeError(
                    "a forward pass on several devices writes the same values"
                    f" to a parameter on each; received others of {p.name!r} "
                    f"on {self._devices[0]} and on {self._devices[i]}, made "
                    "from the rows of each, perhaps. Write them before "
                    "mgpu.initialize, or between steps to replicas.net; or "
                    "use one device.")
            if written[i]:
                raise RuntimeError(
                    "what is written to a network is written to replica 0, "
                    "which is the network itself; received other values of "
                    f"{p.name!r} only on {self._devices[i]}. Write to "
                    "replicas.net, or to all devices with "
                    "Parameter.set_data.")
            if not (written[0] or self._warned):
                self._warned = True
                warnings.warn(
                    f"{p.name!r} had other values on {self._devices[0]}, the "
                    "network's own, which all devices have now. That is right"
                    " where you wrote to replicas.net. Nothing is said after "
                    "Parameter.set_data, nor on torch after writes that it "
                    "counts: p.copy_ under no_grad(), not p.data.copy_. "
                    "(Said once.)",
                    stacklevel=2)
        return differing

    def _contents(self, x: Array) -> bytes | None:
        if len(self._devices) == 1:
            return None     # nobody follows
        views = self._backend.host_views([x], to_read=True)
        return None if views is None else views[0].tobytes()
