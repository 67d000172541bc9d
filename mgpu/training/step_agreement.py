"""Exchange per-step information between ranks."""
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.backends.types import Array
from mgpu.collectives import AllReduce, allreduce_many
from mgpu.training.parameters import Parameter
from mgpu.training.replicas import Replicas
from mgpu.utils.arguments import check_batch_size, is_number


class StepAgreement:
    """Exchange per-step information between a trainer's ranks.

    Before gradients are summed the ranks exchange the parameters that their
    examples reached, their batch sizes, and a digest of everything that an
    update depends on. A single process exchanges nothing.

    Parameters
    ----------
    replicas : Replicas
    strategy : AllReduce
        How gradients are summed over the ranks.
    facts : callable
        Returns what must be equal on all ranks: by name, JSON-serializable.

    Attributes
    ----------
    more : dict
        Facts of the current step.
    """

    def __init__(self, replicas: Replicas, strategy: AllReduce,
                 facts: Callable[[], dict[str, Any]]) -> None:
        self._replicas, self._world = replicas, replicas.span.world
        self._strategy, self._facts = strategy, facts
        self._number = self._world.number()
        self.more: dict[str, Any] = {}
        #: whether this rank's passes have written gradients since the last
        #: step; whether these are not all zeros
        self._has_pass = self._has_part = False

    def begin(self) -> None:
        """Compare the trainers of all ranks. Raises `ModelMismatch`."""
        if self._world.size > 1:
            with self._world.guard():
                facts = {**self._facts(), "number": self._number,
                         "allreduce": repr(self._strategy)}
            self._world.agree("mgpu.Trainer", facts,
                              "Give every rank the same arguments.")

    def batch_size(self, value: Any) -> float:
        """`check_batch_size` of this rank's part, which may have no
        examples, or examples of weight 0."""
        if self._world.size > 1 and is_number(value) and value == 0:
            return 0
        with self._world.guard():
            return check_batch_size(value)

    def total(self, work: str, step: int, batch_size: Any, **more: Any
              ) -> float:
        """The sum of `batch_size` over all ranks, before `work` of `step`.
        `more` must be equal on all ranks."""
        with self._world.guard():
            batch_size = self.batch_size(batch_size)
            self._check_part(batch_size)
            return check_batch_size(sum(self.gather(work, step, batch_size,
                                                    **more)))

    def gather(self, work: str, step: int, value: Any, **more: Any
               ) -> list[Any]:
        """Return the `value` of every rank. Raises
        `mgpu.errors.ModelMismatch` where the facts differ: the indices in a
        list of parameters would mean other parameters on other ranks."""
        world = self._world
        if world.size == 1:
            return [value]
        work += f" of step {step}" if work else f"step {step}"
        if self._number > 1:
            work += f" of trainer {self._number}"
        with world.guard():
            facts = {**self._facts(), **more}
        # Short if all ranks agree: a digest. All facts are exchanged only
        # after a mismatch.
        found = world.gather(work, [
            value, zlib.crc32(json.dumps(facts, sort_keys=True).encode()),
            world.batch_taken()])
        if len({digest for _, digest, _ in found}) > 1:
            world.agree(f"the trainer in {work}", facts,
                        "Set rates, options and grad_req alike on every "
                        "rank: a value computed from, for example, a loss "
                        "differs between ranks.")
        world.check_batches([batch for *_, batch in found])
        return [one for one, *_ in found]

    def join(self, step: int, arrays: Sequence[Array], reached: set[int],
             missing: set[int], batch_size: float | None
             ) -> tuple[set[int], set[int], float]:
        """Over all ranks: the indices of the `arrays` that a backward pass
        has reached; those whose gradients the user has removed; the sum of
        `batch_size` (None: `update` gets it)."""
        replicas, backend = self._replicas, self._replicas.backend
        if self._world.size == 1:
            return reached, missing, batch_size or 0
        self._has_pass = bool(reached)
        self._has_part = not batch_size and any(
            bool(np.any(backend.to_numpy(backend.grad(arrays[j]))))
            for j in reached - missing)
        self._check_part(batch_size)
        found = self.gather("", step, [
            _bits(reached), _bits(missing), batch_size or 0, replicas.moved],
            **self.more, **{
                f"gradient before this step (zero_grad is for all) of {name}":
                x for name, x in replicas.accumulated().items()})
        replicas.moved_by_rank = [one[3] for one in found]
        return (set().union(*(_numbers(one[0]) for one in found)),
                set().union(*(_numbers(one[1]) for one in found)),
                sum(one[2] for one in found))

    def sum(self, parameters: Mapping[Parameter, bool],
            others: Callable[[], list[Array]]) -> None:
        """Sum the gradients of `parameters` and of `others` over the ranks.
        A value of False: this rank has no gradient for the parameter."""
        replicas, backend = self._replicas, self._replicas.backend
        if self._world.size == 1:
            return
        # If this fails, the other ranks are in the middle of the sum.
        with self._world.together():
            gradients = [backend.grad(p.data()) for p in parameters]
            for (p, fresh), g in zip(parameters.items(), gradients):
                if not fresh and not (p.grad_req == "add"
                                      and self._world.is_main):
                    g[...] = 0
            allreduce_many([[g] for g in gradients + others()],
                           algorithm=self._strategy)
            replicas.carried = [p for p in parameters if p.grad_req == "add"]

    def digests(self, parameters: Callable[[], Iterable[Parameter]]
                ) -> dict[str, Any]:
        """In distributed training a checksum of each gradient, which the user
        may have changed."""
        if not self._replicas.span.wide:
            return {}
        with self._world.guard():
            return {"summed gradient": {
                p.name: zlib.crc32(np.ascontiguousarray(
                    self._replicas.backend.to_numpy(p.grad())).tobytes())
                for p in parameters()}}

    def _check_part(self, batch_size: float | None) -> None:
        """Raise ValueError for 0 examples on a rank that has gradients, and
        for examples without a backward pass."""
        if self._world.size == 1:
            return
        rule = "batch_size must be that of the rank's part of the batch, 0 " \
            f"for none; received {batch_size} on {self._world!r}, "
        if batch_size and not self._has_pass:
            raise ValueError(
                rule + "which has had no backward pass since the last step. "
                "Pass 0, or run a backward pass inside record().")
        if batch_size == 0 and self._has_part:
            raise ValueError(
                rule + "whose backward pass has written gradients. Pass the "
                "number of its examples.")


def _bits(numbers: Iterable[int]) -> str:
    return f"{sum(1 << j for j in numbers):x}"


def _numbers(bits: str) -> set[int]:
    mask = int(bits, 16)
    return {j for j in range(mask.bit_length()) if mask >> j & 1}
