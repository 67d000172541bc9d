"""One copy of a user's module, on one device, with Gluon's meaning.

The user's module is changed only during a call: training flags, and the
forward functions of batch-norm and dropout layers, are restored after it.
"""
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from mgpu.backends import base, messages
from mgpu.backends._torch import strict
from mgpu.backends._torch.arithmetic import (BATCH_NORMS, DROPOUTS,
                                             INSTANCE_NORMS,
                                             batch_norm_forward,
                                             computes_itself,
                                             dropout_forward,
                                             gluon_batch_norm, masked_forward,
                                             takes_masks)
from mgpu.backends._torch.attributes import caches_weights
from mgpu.backends._torch.compiled import (compile_module, compiling,
                                           define_mask, threads, ticket_for)
from mgpu.backends._torch.draws import watch
from mgpu.backends._torch.float32 import AsMXNet
from mgpu.backends._torch.gluonize import has_fixed_statistics
from mgpu.backends._torch.graph import recomputing
from mgpu.backends._torch.layers import Between
from mgpu.backends._torch.leaves import Place, users_hooks
from mgpu.backends._torch.modes import saving
from mgpu.backends._torch.names import arrays_of, joined, walk
from mgpu.backends._torch.ops import dtype_of

if TYPE_CHECKING:
    from mgpu.backends._torch.network import TorchNetwork

# Held while a thread draws from torch's default stream, which all threads
# share.
_everyone = threading.RLock()
# .stop: in a thread that holds `_everyone` because it draws data
_here = threading.local()

#: layers, and what each computes by
Forwards = Sequence[tuple[nn.Module, Callable[..., Any]]]


class TorchReplica(base.Replica):
    """One module on one device.

    Attributes
    ----------
    module : torch.nn.Module
        The user's module or a copy of it, with parameters, hooks and
        attributes of its own.
    ticket : torch.Tensor
        Represents this replica in compiled code: see `ticket_for`.
    """

    def __init__(self, network: "TorchNetwork", module: nn.Module, device,
                 index: int):
        self.module, self.device, self.index = module, device, index
        self._network = network
        self._handle = network.backend.handle(device)
        self.layers = list(module.modules())
        strict.place(arrays_of(module), device)
        self.weights, buffers = (
            [(getattr(m, of), name) for _, m, name, _ in walk(module, of)]
            for of in ("_parameters", "_buffers"))
        self._owners = self.weights + buffers
        self._paths = [joined(path, name)
                       for of in ("_parameters", "_buffers")
                       for path, _, name, _ in walk(module, of)]
        #: who watches the layers, and what tells of functions in a call
        self.seen: base.LayerCallback | None = None
        self.between: Between | None = None
        #: the user's training flags, while others are set
        self.users: list[bool] | None = None
        own = [k for k, m in enumerate(self.layers) if getattr(
            m.train, "__func__", None) is not nn.Module.train]
        below = {id(m) for k in own for m in self.layers[k].modules()
                 if m is not self.layers[k]}
        self._inside = [id(m) in below for m in self.layers]
        #: the modules whose ``train`` the user has written
        self._switches = [k for k in own if not self._inside[k]]
        if index == 0 and all(m.training for m in self.layers):
            # As net.train() at the begin of a script: it may freeze layers.
            for k in self._switches:
                self.layers[k].train(True)
        norms = [(path, m) for path, m in module.named_modules()
                 if isinstance(m, BATCH_NORMS)]
        self._batch_norms = [(path, m) for path, m in norms
                             if not computes_itself(m)]
        #: batch-norm layers with a forward pass of the user's
        self.own_batch_norms = [path for path, m in norms
                                if computes_itself(m)
                                and not has_fixed_statistics(m)]
        #: normalising layers that `normalise` cannot join
        self.not_joined = [
            path for path, m in module.named_modules()
            if isinstance(m, INSTANCE_NORMS) and m.running_mean is not None]
        self.ticket = ticket_for(self)
        if any(type(m) in DROPOUTS for m in self.layers):
            define_mask()      # the user may have compiled the network
        # The same functions in every call: compiled code checks that they
        # are those it was made from.
        self._dropouts = [(m, dropout_forward(m, self.generator, self.ticket))
                          for m in self.layers if type(m) in DROPOUTS]
        # A layer without running statistics computes as torch does.
        self._own = self._dropouts + [
            (m, batch_norm_forward(m, path, gluon_batch_norm, index,
                                   self._keeps_statistics))
            for path, m in self._batch_norms if m.running_mean is not None]
        #: by training flag: the compiled network
        self._compiled: dict[bool, Callable[..., Any]] = {}
        self._known: set[Any] = set()       # calls that compile nothing
        #: whether it draws from torch's default stream (functional dropout,
        #: attention or recurrent dropout); None: it has not trained yet
        self._draws: bool | None = None
        #: the same of its predictions, backward passes, and of its loss
        self._predicts_draws: bool | None = None
        self._backward_draws: bool | None = None
        self._loss_draws: bool | None = None
        self._caches = caches_weights(self.layers)
        #: the modes that the layers had then
        self._quiet: Sequence[bool | None] = ()
        #: in this replica's turn: the state of that stream outside of it
        self._users: torch.Tensor | None = None
        self._halted = False    # in its turn, while others run
        self._masks: dict[int, Any] = {}    # that a backward pass needs again
        self._graph = True  # the pass records one
        self._saving: Any = None    # hooks of the user's around the pass
        self._met = False   # replicas met in the pass that is computed again

    def array(self, number: int) -> Any:
        # Looked up in every call: a user may replace the tensor.
        owner, name = self._owners[number]
        array = owner.get(name)
        if array is None:
            raise messages.changed_layers([self._paths[number]])
        return array

    def own_generator(self) -> torch.Generator:
        """The stream of the masks of dropout layers."""
        return self._network.backend.generator(self.device)

    def generator(self) -> torch.Generator | None:
        """`own_generator`; or None, torch's default stream, for what a
        backward pass computes again: checkpoints restore that one."""
        network = self._network
        if self._again():
            return None
        if not network.backend.is_recording() or network.normalise is not None\
                or saving() == self._saving \
                and torch.is_grad_enabled() is self._graph:
            return self.own_generator()
        if self._draws is False:
            # Others may have drawn since the checkpoint read its state.
            self._draws = True
            if len(network.replicas) > 1:
                raise RuntimeError(
                    "a dropout layer inside a checkpoint must be met in a "
                    "replica's first training pass; received one in a later "
                    f"pass, on {self.device}. Run this step again: from now "
                    "on the replicas take turns.")
        return None

    def _again(self) -> bool:
        """Whether a backward pass computes again what layers have
        computed."""
        if not recomputing():
            return False
        if self._met:
            raise RuntimeError(
                "with batch_norm='sync' the replicas meet in the forward "
                "pass only; received a checkpoint around a batch-norm or "
                f"dropout layer, which {self.device} computes again by "
                "itself. Use batch_norm='per_device' or 'average', or leave "
                "such layers out of checkpoints.")
        return True

    def _keeps_statistics(self) -> bool:
        """Whether batch-norm layers update their running statistics now."""
        return not self._again() and self._network.backend.is_recording()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        network = self._network
        backend, options = network.backend, network.options
        given = *inputs, *named.values()
        backend.check_inputs(given, self.device)
        training, recording = backend.is_training(), backend.is_recording()
        if options.channels_last:
            inputs = tuple(map(channels_last, inputs))
            named = {name: channels_last(x) for name, x in named.items()}
        modes = self._modes(training)
        draws = True in modes
        forwards = self._forwards() if draws else ()
        with contextlib.ExitStack() as stack:
            if self.index == 0:
                stack.callback(network.leave)
            stack.callback(self._dress(modes, forwards))
            may_draw = network.draws[draws]
            if may_draw is None:
                may_draw = self._may_draw(modes) if draws \
                    else self._predicts_draws is not False
            if may_draw or self._caches:
                stack.enter_context(self._in_turn(
                    "_draws" if draws else "_predicts_draws"))
            if network.float32.names or network.float32.watched:
                stack.enter_context(AsMXNet(network.float32))
            if self.seen is not None:
                self.between = stack.enter_context(
                    Between(self.seen, self.index, network.functions))
            if network.normalise is not None:
                stack.enter_context(_NoFunctionalBatchNorm())
            if options.autocast is not None:
                stack.enter_context(autocast(self._handle, options))
            if torch.is_grad_enabled() and not recording:
                stack.enter_context(torch.no_grad())
            self._graph = torch.is_grad_enabled()
            self._saving = saving()
            try:
                with network.guarded():
                    result = self._run(inputs, named, training)
                network.check_read()
            except (RuntimeError, ValueError) as error:
                network.check_read()
                network.explain(error, given)
                network.explain_states(error, given, self.module)
                raise
            if options.autocast is not None:
                result = tree_map(
                    partial(_widened, dtype_of(options.autocast)), result)
            if recording:
                place, tensors = self.place(), list(_tensors(result, set()))
                place.record()
                place.unseen |= not tensors
                begins = partial(
                    self._backward_begins, [m.training for m in self.layers],
                    forwards, network.normalise is not None)
                for x in tensors:
                    if x.grad_fn is not None:
                        x.register_hook(begins)
            return result

    # -- whose modes and hooks: those of replica 0 ---------------------------

    def _modes(self, training: bool) -> list[bool | None]:
        """The training flag that each layer is to have; None: the one that
        its parent's own ``train`` gives it.

        A layer in eval mode under a network in training mode is frozen.
        """
        first = self._network.first(self)
        with self._network.reading:
            users = first.users or [m.training for m in first.layers]
        if first is not self:
            self._set_modes(users)
        if not training and not users[0] and True in users:
            self._check_predicting(users)
        elif not (training and users[0]):
            return [None if inside else training for inside in self._inside]
        return list(users)

    def _check_predicting(self, users: Sequence[bool]) -> None:
        """Refuse layers in training mode, in a network that predicts, whose
        numbers would depend on the rows of each device."""
        trained = {id(m) for m, mode in zip(self.layers, users) if mode}
        found = [path for path, m in self.module.named_modules()
                 if id(m) in trained
                 and isinstance(m, (*BATCH_NORMS, *INSTANCE_NORMS))
                 and m.running_mean is not None]
        if found:
            raise ValueError(
                "a layer that keeps running statistics does not train in a "
                f"prediction; received {found} in training mode, in a network"
                " in eval mode. Call .eval() on them; or, to move their "
                "statistics, call replicas.net itself.")

    def _may_draw(self, modes: Sequence[bool | None]) -> bool:
        """Whether a pass with layers in these `modes` may draw from torch's
        default stream: none with the same ones is known not to."""
        if self._draws is False and self._quiet != modes:
            self._draws = None
        self._quiet = modes
        return self._draws is not False

    def _set_modes(self, modes: Sequence[bool | None]) -> None:
        layers = self.layers
        for number in self._switches:   # the user may change more than flags
            mode = modes[number]
            if mode is not None and layers[number].training is not mode:
                layers[number].train(mode)
        for module, mode in zip(layers, modes):
            if mode is not None and module.training is not mode:
                _set_training(module, mode)

    def _dress(self, modes: Sequence[bool | None], forwards: Forwards
               ) -> Callable[[], None]:
        """Give the layers `modes`, and those that train `forwards`. Returns
        a function that puts back what was there."""
        patched: list[nn.Module] = []
        with self._network.reading:
            before = [m.training for m in self.layers]
            outermost = self.users is None
            self.users = self.users or before

        def put_back() -> None:
            for layer in patched:
                del layer.__dict__["forward"]
            self._set_modes(before)
            if outermost:
                self.users = None
        try:
            self._set_modes(modes)
            for layer, forward in forwards:
                if layer.training and "forward" not in layer.__dict__:
                    patched.append(layer)
                    layer.__dict__["forward"] = forward
        except BaseException:
            put_back()
            raise
        return put_back

    def borrow_hooks(self) -> None:
        """Let the hooks that the user puts on replica 0's parameters, now or
        later, act here too."""
        found = weakref.WeakMethod(self._hooks)     # or no network would end

        def hooks(number: int, table: str) -> list[Callable[[Any], Any]]:
            here = found()
            return [] if here is None else here(number, table)
        for number, (owner, name) in enumerate(self.weights):
            self._network.backend.borrow_hooks(owner[name],
                                               partial(hooks, number))

    def _hooks(self, number: int, table: str) -> list[Callable[[Any], Any]]:
        """The user's hooks on parameter `number` of replica 0, each bound to
        the module here that it is bound to there."""
        first, found = self._network.first(self), []
        owner, name = first.weights[number]
        for hook in users_hooks(owner[name], table):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, nn.Module) and owner in first.layers:
                hook = hook.__func__.__get__(
                    self.layers[first.layers.index(owner)])
            found.append(hook)
        return found

    # -- a backward pass ----------------------------------------------------

    def place(self) -> Place:
        """What is known of the gradients of its leaves."""
        trained = next((owner[name] for owner, name in self.weights
                        if owner[name].requires_grad), None)
        return Place() if trained is None \
            else self._network.backend.place_of(trained)

    def _backward_begins(self, modes: list[bool], forwards: Forwards,
                         met: bool, _: Any) -> None:
        """Let what the backward pass computes again (checkpoints) see the
        modes and the functions of the forward pass."""
        self._network.reached.add(self.index)
        place = self.place()
        running = place.running()
        running.is_part |= place.has_part()
        if running.undo is not None:
            return
        with contextlib.ExitStack() as stack:
            first = self._network.first(self)
            for (theirs, name), (own, _) in zip(first.weights, self.weights):
                # The user has frozen it since the forward pass.
                if own[name].requires_grad and not theirs[name].requires_grad:
                    own[name].requires_grad_(False)
                    stack.callback(own[name].requires_grad_, True)
            draws = self._network.draws["backward"]
            if draws is None:
                draws = self._backward_draws is not False
            if (self._draws or draws) and self._handle.type == "cpu":
                # Checkpoints set the default stream, which threads share.
                stack.enter_context(_everyone)
                if draws and not watch.inside:  # one pass of all devices
                    stack.enter_context(self._in_turn("_backward_draws"))
            stack.callback(self._masks.clear)
            stack.callback(self._dress(modes, forwards))
            self._met = met
            running.undo = stack.pop_all().close

    # -- computing ----------------------------------------------------------

    def _forwards(self) -> Forwards:
        """The layers that compute by functions of mgpu in training."""
        network = self._network
        normalise, masks = network.normalise, network.draw_mask
        if normalise is None and masks is None:
            return self._dropouts if network.own_arithmetic else self._own
        found = list(self._dropouts) if masks is None else [
            (m, masked_forward(m, masks, self.index, self.generator,
                               self._masks))
            for m in self.layers if takes_masks(m)]
        for path, m in self._batch_norms:
            if normalise is not None or not (network.own_arithmetic
                                        or m.running_mean is None):
                found.append((m, batch_norm_forward(
                    m, path, normalise or gluon_batch_norm, self.index,
                    self._keeps_statistics)))
        return found

    def _run(self, inputs: tuple[Any, ...], named: dict[str, Any],
             training: bool) -> Any:
        network = self._network
        # The layers of compiled code cannot be reached.
        if not network.options.hybridize or network.by_layer or strict.on():
            return self.module(*inputs, **named)
        call = (tuple(m.training for m in self.layers),
                torch.is_grad_enabled(), network.own_arithmetic, *(
            (x.shape, x.stride(), x.dtype, x.requires_grad)
            if isinstance(x, torch.Tensor) else repr(x)
            for x in tree_leaves((inputs, named))), *named)
        with compiling(exclusive=call not in self._known), \
                threads(network.backend.threads):
            if training not in self._compiled:
                self._compiled[training] = compile_module(
                    self.module, network.backend.threads)
            result = self._compiled[training](*inputs, **named)
        self._known.add(call)
        return result

    def forget(self) -> None:
        """Expect that every kind of call may have to be compiled again."""
        self._known.clear()

    @contextlib.contextmanager
    def _in_turn(self, learn: str = "_draws") -> Iterator[None]:
        """Inside the block, no other replica runs, and this device's random
        stream stands in for torch's default one, which all threads share.
        `learn`: the attribute that is to say whether it was drawn from."""
        with _everyone:
            if self._users is not None:     # a loss that calls the network
                yield
                return
            self._exchange_streams()
            try:
                yield
            finally:
                drew = self._exchange_streams()
                setattr(self, learn, drew or bool(getattr(self, learn)))

    def around_loss(self) -> contextlib.AbstractContextManager:
        """`_in_turn` while the loss of this device is computed, unless it is
        known not to draw."""
        return contextlib.nullcontext() if self._loss_draws is False \
            else self._in_turn("_loss_draws")

    def learn_again(self) -> None:
        """What it draws has to be seen again."""
        self._draws = self._draws or None
        self._predicts_draws = self._predicts_draws or None
        self._backward_draws = self._backward_draws or None
        self._loss_draws = self._loss_draws or None

    def halt(self) -> None:
        """Let the other replicas run, for which this one waits."""
        self._halted = self._users is not None
        if self._halted:
            self._draws = self._exchange_streams() or self._draws
            _everyone.release()

    def go_on(self) -> None:
        """Take the turn again that `halt` has ended."""
        if self._halted:
            _everyone.acquire()
            self._halted = False
            self._exchange_streams()

    def _exchange_streams(self) -> bool:
        """Let this device's stream stand in for torch's default one, or end
        that. Returns whether it was drawn from."""
        default = torch.default_generator if self._handle.type == "cpu" \
            else torch.cuda.default_generators[self._handle.index]
        own = self._network.backend.generator(self.device, "functional")
        before, now = own.get_state(), default.get_state()
        if self._users is None:
            watch.turn(True)
            self._users = now
            default.set_state(before)
            return False
        own.set_state(now)
        default.set_state(self._users)
        self._users = None
        watch.turn(False)
        return not torch.equal(before, now)


class _NoFunctionalBatchNorm(TorchFunctionMode):
    """Inside, layers of the user's own do not normalise by the rows of one
    device."""

    def __torch_function__(self, function: Any, types: Any,
                           args: tuple[Any, ...] = (), kwargs: Any = None
                           ) -> Any:
        kwargs = kwargs or {}
        if function in (F.batch_norm, torch.batch_norm) and kwargs.get(
                "training", len(args) > 5 and args[5]):
            raise messages.not_joined(["F.batch_norm"])
        return function(*args, **kwargs)


@contextlib.contextmanager
def undisturbed(stop: Sequence[Any]) -> Iterator[None]:
    """See `mgpu.backends.base.Backend.drawing`."""
    _take_turn(stop)
    try:
        yield
    finally:
        _give_turn()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """See `mgpu.backends.base.Backend.aside`."""
    stop = _give_turn()
    try:
        yield
    finally:
        if stop is not None:
            _take_turn(stop)


def _take_turn(stop: Sequence[Any]) -> None:
    # The holder may wait for this thread, having said `stop`.
    while not _everyone.acquire(timeout=0.05):
        if stop:
            raise InterruptedError("nobody waits for this work any more")
    watch.turn(True)
    _here.stop = stop


def _give_turn() -> Sequence[Any] | None:
    """End this thread's turn to draw data; None where it has none."""
    stop = getattr(_here, "stop", None)
    if stop is not None:
        _here.stop = None
        watch.turn(False)
        _everyone.release()
    return stop


def _tensors(result: Any, met: set[int]) -> Iterator[torch.Tensor]:
    """The tensors of an output, also those in objects of the user's."""
    for x in tree_leaves(result):
        if isinstance(x, torch.Tensor):
            yield x
        elif id(x) not in met and not isinstance(x, (type, nn.Module)):
            met.add(id(x))
            if isinstance(x, Mapping):
                yield from _tensors(list(x.values()), met)
            if hasattr(x, "__dict__"):
                yield from _tensors(list(vars(x).values()), met)


def _set_training(module: nn.Module, training: bool) -> None:
    # not module.train(), which a user may have overridden, nor setattr,
    # which looks for parameters and buffers of that name first
    if "training" in module.__dict__:
        module.__dict__["training"] = training
    else:       # a ScriptModule keeps it elsewhere
        module.training = training


def channels_last(x: Any) -> Any:
    """A 4-d tensor with its channels last in memory; else `x`."""
    return x.contiguous(memory_format=torch.channels_last) \
        if isinstance(x, torch.Tensor) and x.dim() == 4 else x


def autocast(handle: torch.device, options: base.Options) -> Any:
    """Torch's autocast of `Options.autocast`."""
    # No cache of cast weights: a pass uses each weight once, as a rule, and
    # all threads share the cache.
    return torch.autocast(handle.type, dtype_of(options.autocast),
                          cache_enabled=False)


def _widened(narrow: torch.dtype, x: Any) -> Any:
    # The outputs of a network may be summed, or read by NumPy.
    return x.float() if isinstance(x, torch.Tensor) and x.dtype is narrow \
        else x
