"""The PyTorch backend."""
import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch

from mgpu.backends import messages
from mgpu.backends._allocator import keep_freed_memory
from mgpu.backends._torch import modes, openmp, strict
from mgpu.backends._torch.data_parallel import Arrays, DataParallel
from mgpu.backends._torch.gradients import Gradients
from mgpu.backends._torch.graph import recomputing
from mgpu.backends._torch.network import TorchNetwork, without_values
from mgpu.backends._torch.ops import TorchOps, dtype_of
from mgpu.backends._torch.streams import (Draws, aside, default_generators,
                                          undisturbed, watch)
from mgpu.backends._workers import Workers, inside_worker, run_here
from mgpu.backends.base import Backend
from mgpu.backends.ledger import Ledger
from mgpu.backends.scope import Scope
from mgpu.backends.types import ContextManager, Device
from mgpu.utils import environment
from mgpu.utils.arguments import integer
from mgpu.utils.signals import uninterrupted

_recording: ContextVar[bool] = ContextVar("mgpu_recording", default=False)
_training: ContextVar[bool] = ContextVar("mgpu_training", default=False)

_MARKER = 0x6D677075        # a seed that reveals a manual seed


def _read_flags() -> tuple[bool, bool, bool]:
    return _recording.get(), _training.get(), torch.is_grad_enabled()


def _write_flags(recording: bool | None, training: bool | None,
                 grad: bool | None) -> None:
    if recording is not None:
        _recording.set(recording)
    if training is not None:
        _training.set(training)
    if grad is not None:
        torch._C._set_grad_enabled(grad)


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """Context manager in which the caller waits for the devices' threads."""
    openmp.end_threads()
    with aside():
        yield


class TorchBackend(Gradients, Backend):
    """PyTorch as a backend of mgpu."""

    name = semantics = "torch"
    plain_request = "add"
    finds_failed = "CUDA_LAUNCH_BLOCKING=1"
    version = torch.__version__
    batch_arrays = Arrays
    reads_streams = True

    def __init__(self) -> None:
        super().__init__()
        keep_freed_memory()
        self.ops = TorchOps()
        self._seed = self._first = 0
        self._generators: dict[Any, torch.Generator] = {}
        # set_num_threads affects the calling thread only, so each device has
        # its share, and threads of the user are unaffected.
        self.threads = threads = environment.threads_per_device()
        self._workers = Workers(
            "mgpu-torch", partial(openmp.begin_thread, threads), self.carry,
            aside=_waiting)

    # -- devices and arrays -------------------------------------------------

    def num_gpus(self) -> int:
        physical = torch.cuda.device_count()
        return (environment.logical_gpus() or physical) if physical else 0

    def handle(self, device: Any) -> torch.device:
        """The torch device of a `Device`."""
        if device.kind == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", device.index % torch.cuda.device_count())

    def put(self, x: Any, where: Any, *, dtype: str | None = None) -> Any:
        if strict.on():
            return strict.put(lambda x: self._put(x, where, dtype), x, where)
        return self._put(x, where, dtype)

    def _put(self, x: Any, where: Any, dtype: str | None) -> Any:
        target = where.device if isinstance(where, torch.Tensor) \
            else self.handle(where)
        want = None if dtype is None else dtype_of(dtype)
        if not isinstance(x, torch.Tensor):
            messages.refuse_foreign(x, self.name)
            x = torch.from_numpy(messages.host_array(x))
            if target.type == "cpu":    # host_array has made a copy
                return x if want is None else x.to(want)
        if x.device == target and want is None:
            return x.clone()
        return x.to(device=target, dtype=want or x.dtype, copy=True,
                    non_blocking=x.is_pinned() if x.device.type == "cpu"
                    and target.type == "cuda" else False)

    def pinner(self, devices: Sequence[Any]) -> Callable[[Any], Any] | None:
        return _pinned if any(d.kind == "gpu" for d in devices) \
            and torch.cuda.is_available() else None

    def to_numpy(self, x: Any) -> np.ndarray:
        if not isinstance(x, torch.Tensor):
            raise messages.not_native(x, self.name)
        strict.fetched(x)
        if x.dtype is torch.bfloat16:       # NumPy has none: exact in float32
            x = x.float()
        # Not a view of the array, which passes could not resize then.
        return x.detach().cpu().clone(
            memory_format=torch.contiguous_format).numpy()

    def is_native(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    def synchronize(self, devices: Sequence[Any]) -> None:
        for handle in {self.handle(d) for d in devices if d.kind == "gpu"}:
            torch.cuda.synchronize(handle)

    def check_inputs(self, inputs: Sequence[Any], device: Any) -> None:
        """Raise ValueError for inputs of the replica on `device` that are on
        another device."""
        handle = self.handle(device)
        for x in inputs:
            if isinstance(x, torch.Tensor):
                if x.device != handle:
                    raise messages.wrong_device(device, x.device)
                strict.check(x, device)
            else:
                messages.refuse_foreign(x, self.name)

    # -- host memory --------------------------------------------------------

    def host_views(self, arrays: Sequence[Any], *, to_read: bool = False
                   ) -> list[np.ndarray] | None:
        if strict.on() and not to_read:
            return None
        if to_read:     # NumPy has no bfloat16: pass the bits
            arrays = [x.detach().view(torch.int16)
                      if x.dtype is torch.bfloat16 else x for x in arrays]
        if any(x.is_cuda or x.layout is not torch.strided
               or x.dtype is torch.bfloat16 for x in arrays):
            return None
        if all(x.is_contiguous() for x in arrays):
            return [_bytes(x) if to_read else x.detach().numpy().reshape(-1)
                    for x in arrays]
        if any(x.stride() != arrays[0].stride() for x in arrays):
            return [x.detach().numpy().reshape(-1)
                    for x in arrays] if to_read else None
        views = [x.detach().numpy().ravel(order="K") for x in arrays]
        # An array without a base is a copy, because of gaps.
        return views if to_read or all(
            x.base is not None for x in views) else None

    def run_on_host_views(self, thunks, written) -> None:
        try:
            uninterrupted(lambda: self._workers.run(thunks, carry=False))
        finally:
            # A graph that needs the old values raises then.
            torch.autograd.graph.increment_version(written)

    def library_reduces(self, arrays: Sequence[Any]) -> bool:
        # is_available: contiguous arrays, each on a different card
        return all(x.is_cuda for x in arrays) \
            and torch.cuda.nccl.is_available(arrays)

    def library_allreduce(self, arrays: Sequence[Any], op: str) -> None:
        if not self.library_reduces(arrays):
            raise ValueError(
                "NCCL needs contiguous arrays on different CUDA cards; "
                "received arrays on "
                f"{', '.join(str(x.device) for x in arrays)}. Use "
                "another algorithm, or 'auto'.")
        # of nccl.h
        torch.cuda.nccl.all_reduce(list(arrays),
                                   op={"sum": 0, "max": 2, "min": 3}[op])

    def scope(self, recording=None, training=None) -> ContextManager:
        return Scope(_read_flags, _write_flags,
                     (recording, training, recording))

    def is_recording(self) -> bool:
        return _recording.get()

    def is_training(self) -> bool:
        return _training.get()

    # -- running on several devices -----------------------------------------

    def parallel(self, thunks, *, rendezvous=False) -> list[Any]:
        if rendezvous and inside_worker() and len(thunks) > 1:
            raise messages.nested_rendezvous()
        if rendezvous and len(thunks) > 1 and modes.watching():
            raise messages.watched_rendezvous(modes.watching())
        return self.run(thunks)

    def run(self, thunks: Sequence[Callable[[], Any]], here: bool = False
            ) -> list[Any]:
        """Call thunks, number i in the thread of device i, or with `here` in
        the calling thread, on the same number of cores, which gives the same
        bits."""
        if len(thunks) == 1:
            return self._workers.run(thunks)
        watched = not here and modes.watching()     # by the calling thread
        before = None if watched else watch.state()
        try:
            if not (here or watched):
                return self._workers.run(thunks)
            with self.device_threads():
                return run_here(thunks)
        finally:
            watch.check(before)

    def carry(self) -> Callable[[], ContextManager]:
        grad = torch.is_grad_enabled()
        inference = torch.is_inference_mode_enabled()
        autocast = [(kind, torch.get_autocast_dtype(kind))
                    for kind in ("cpu", "cuda")
                    if torch.is_autocast_enabled(kind)]
        carried = modes.carried()

        @contextlib.contextmanager
        def all_modes() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                if inference:
                    stack.enter_context(torch.inference_mode())
                for kind, dtype in autocast:
                    stack.enter_context(torch.autocast(kind, dtype))
                stack.enter_context(torch.set_grad_enabled(grad))
                stack.enter_context(carried())
                yield
        return all_modes

    def seed(self, seed: int) -> None:
        self._seed = seed
        self._generators.clear()

    def number_devices(self, first: int) -> None:
        if first != self._first:
            self._first = first
            self._generators.clear()

    def generator(self, device: Any, use: str = "layers") -> torch.Generator:
        """The random stream of `device`. Threads that share torch's default
        stream would draw different numbers in each run."""
        if (device, use) not in self._generators:
            entropy = [self._seed, ("cpu", "gpu").index(device.kind),
                       self._first + device.index,
                       ("layers", "functional").index(use)]
            seed, = np.random.SeedSequence(entropy).generate_state(1)
            self._generators[device, use] = torch.Generator(
                self.handle(device)).manual_seed(int(seed))
        return self._generators[device, use]

    def fan_out(self, x: Any, count: int) -> list[Any]:
        # Otherwise the order of additions in a backward pass depends on how
        # many operations each thread has recorded.
        return list(x.expand(count, *x.shape).unbind())

    def data_parallel(self, net, devices, split, remake, synchronize):
        return DataParallel(net, [self.handle(d) for d in devices], self.run,
                            split, remake, synchronize)

    def once(self, known, key, part, compute):
        if not recomputing():
            count, total = compute()
            known.setdefault(key, []).append((
                count, total.detach().requires_grad_(total.requires_grad)))
            return count, total
        found = known.get(key, ())
        if len(found) != 1 or part.requires_grad > found[0][1].requires_grad:
            raise messages.not_again()
        return found[0]

    def through(self, x, forth, back, after=None):
        if after is None:
            after = x.detach().new_zeros(())
        return _Through.apply(x, after, self, forth, back)

    def export_streams(self) -> dict[str, np.ndarray]:
        cpu, *gpus = default_generators()
        streams = {(Device("cpu"), "default"): cpu, **{
            (Device("gpu", i), "default"): gpu
            for i, gpu in enumerate(gpus)}, **self._generators}
        return {"seed": np.array(str(self._seed)), **{
            f"{device.kind} {device.index} {use}": stream.get_state().numpy()
            for (device, use), stream in streams.items()}}

    @contextlib.contextmanager
    def full_precision(self) -> Iterator[None]:
        cudnn, before = torch.backends.cudnn, (
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32)
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = False
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            cudnn.allow_tf32 = before[1]

    def draws(self, thunk, devices):
        for device in devices:      # otherwise created by a first pass
            self.generator(device), self.generator(device, "functional")
        put_back = self.fit_streams(self.export_streams())
        own = list(self._generators.values())
        try:
            for generator in (*default_generators(), *own):
                generator.manual_seed(_MARKER)
            with Draws(own) as seen:
                made = thunk()
                torch.empty(0)      # checks once more
        finally:
            new = list(self._generators.values()) != own
            put_back()
        return made, seen.found or new

    def fit_streams(self, streams: Mapping[str, np.ndarray]
                    ) -> Callable[[], None]:
        streams = dict(streams)
        seed = integer("seed", int(str(streams.pop("seed"))), 0)
        found = {}
        for name, state in streams.items():
            kind, index, use = name.split()
            device = Device(("cpu", "gpu")[kind == "gpu"], int(index))
            found[device, use] = torch.Generator(self.handle(device))
            found[device, use].set_state(torch.from_numpy(state.copy()))

        def put_back() -> None:
            self.seed(seed)
            for (device, use), generator in found.items():
                if use != "default":
                    self._generators[device, use] = generator
                elif device.kind == "cpu":
                    torch.set_rng_state(generator.get_state())
                else:
                    torch.cuda.set_rng_state(generator.get_state(),
                                             device.index)
        return put_back

    def drawing(self, stop: Sequence[Any]
                ) -> Callable[[], ContextManager]:
        return partial(undisturbed, stop)

    def device_threads(self) -> ContextManager:
        return openmp.threads(self.threads)

    def aside(self) -> ContextManager:
        return aside()

    # -- debugging ----------------------------------------------------------

    def strict(self, ledger: Any) -> ContextManager:
        return strict.strict(ledger)

    def wait_for(self, x: Any) -> None:
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)

    def memory(self, x: Any) -> tuple[Any, int, int]:
        if x.layout is not torch.strided:   # sparse: several tensors
            return x.get_device(), 0, 0
        begin = x.data_ptr()
        end = begin + x.nbytes
        if not x.is_contiguous():       # and so not empty
            end = begin + x.element_size() * (1 + sum(
                (n - 1) * step for n, step in zip(x.shape, x.stride())))
        return x.get_device(), begin, end

    def check_writable(self, x: Any) -> None:
        if x.layout is not torch.strided:
            raise messages.no_places(
                "a sparse tensor", "x.to_dense(), and layers without "
                "sparse=True")
        if x.is_contiguous():
            return
        reach = 0
        for step, n in sorted(zip(x.stride(), x.shape)):
            if n > 1 and step <= reach:
                raise messages.no_places(
                    f"a tensor of shape {tuple(x.shape)} with strides "
                    f"{x.stride()}, as of expand()", "x.contiguous()")
            reach += (n - 1) * step

    def is_dense(self, x: Any) -> bool:
        return x.layout is torch.strided and not x.is_nested

    # -- networks -----------------------------------------------------------

    def network(self, net: Any) -> TorchNetwork:
        if not isinstance(net, torch.nn.Module):
            raise messages.not_a_network(net, self.name, "torch.nn.Module")
        return TorchNetwork(self, net)

    def parts(self, x: Any) -> list[tuple[str, Any]] | None:
        return [*x._modules.items(), *x._buffers.items(),
                *x._parameters.items()] \
            if isinstance(x, torch.nn.Module) else None

    def gluonize(self, net: Any, on: bool = True) -> Any:
        from mgpu.backends._torch.gluonize import gluonize
        return gluonize(self.network(net).net, on)

    def model(self, name: str, **options: int) -> Any:
        from mgpu.backends._torch.models import MODELS
        return without_values(MODELS[name](**options))

    def from_gluon(self, symbol, params, dtype, softmax, frozen=()):
        from mgpu.backends._torch.gluon.build import from_gluon
        net = from_gluon(symbol, params, dtype, softmax)
        for key, x in net.named_parameters():
            if net.gluon_names[key].removeprefix("arg:") in frozen:
                x.requires_grad_(False)
        return net

    def converter(self, name: str) -> Callable[..., Any]:
        from mgpu.backends._torch.gluon import converters
        found: Callable[..., Any] = getattr(converters, name)
        return found

    # -- advice -------------------------------------------------------------

    def doctor(self) -> list[tuple[str, str]]:
        found = [("info", f"GPU {i}: {torch.cuda.get_device_name(i)}")
                 for i in range(torch.cuda.device_count())]
        if torch.version.cuda is None:
            found.append(("info", "this build of torch is for CPUs only; for "
                          "one with CUDA see pytorch.org, Get Started."))
        elif not torch.cuda.is_available():
            found.append(("warning", "torch is built for CUDA "
                          f"{torch.version.cuda} and finds no GPU; run "
                          "nvidia-smi to see whether the driver finds one."))
        if environment.logical_gpus() and not self.num_gpus():
            found.append(("warning", "MGPU_LOGICAL_GPUS is set, and there is "
                          "no physical GPU that logical ones could share."))
        return found


class _Through(torch.autograd.Function):
    """See `mgpu.backends.base.Backend.through`. A backward pass orders nodes
    that are ready by the number of operations recorded in each thread; so
    each call depends on the previous one, through a scalar."""

    @staticmethod
    def forward(ctx: Any, x: Any, after: Any, backend: TorchBackend,
                forth: Any, back: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.back, ctx.backend = back, backend
        ctx.like = x.new_empty(0)
        return backend.put(forth(backend.to_numpy(x)), x,
                           dtype=x.dtype), after.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        found = ctx.back(None if gradient is None
                         else ctx.backend.to_numpy(gradient)) \
            if ctx.needs_input_grad[0] else None
        if found is not None:
            found = ctx.backend.put(found, ctx.like, dtype=ctx.like.dtype)
        return found, None, None, None, None


def _bytes(x: torch.Tensor) -> np.ndarray:
    """A view of the memory of `x`, which it does not keep alive. ``numpy()``
    would prevent torch from resizing the array, as passes resize some
    buffers."""
    return np.frombuffer(
        (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr()),
        np.uint8) if x.nbytes else np.empty(0, np.uint8)


def _pinned(x: Any) -> Any:
    """Copy host data to page-locked memory.

    Returns a tensor, because torch keeps the memory until copies from the
    tensor, or from a view of it, are done.
    """
    if isinstance(x, np.ndarray) and x.dtype.name in messages.DTYPES:
        pinned = torch.empty(x.shape, dtype=dtype_of(x.dtype), pin_memory=True)
        np.copyto(pinned.numpy(), x)
        return pinned
    if isinstance(x, torch.Tensor) and x.layout is torch.strided \
            and x.device.type == "cpu":
        return x.pin_memory()
    return x


if environment.strict_devices():
    strict.always(Ledger())

BACKEND = TorchBackend
