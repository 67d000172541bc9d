"""Functions of MXNet on sequences and arrays that torch has not."""
import torch


def floating(x: torch.Tensor, op: str) -> torch.Tensor:
    """`x` itself. TypeError for whole numbers, of which MXNet's `op` makes
    numbers of another type than PyTorch."""
    if not x.is_floating_point():
        raise TypeError(
            f"MXNet's {op} makes other numbers of whole numbers than PyTorch "
            f"(it cuts fractions off); received {x.dtype}. Pass floats.")
    return x


def kept(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`y`, what `x` sums to, in the dtype of `x`, where whole numbers wrap in
    MXNet. Booleans are counted in int64."""
    return y if x.dtype is torch.bool else y.to(x.dtype)


def still(x: torch.Tensor, op: str) -> torch.Tensor:
    """`x` itself; TypeError if it needs a gradient, which MXNet's `op` to
    whole numbers hands on and PyTorch's has not."""
    if x.requires_grad and torch.is_grad_enabled() \
            and not torch.compiler.is_exporting():
        raise TypeError(
            f"MXNet's {op} to whole numbers hands a gradient on, PyTorch's "
            "has none; received an array that needs one. Predict under "
            "torch.no_grad(), or stop the gradient before it in Gluon "
            "(F.stop_gradient).")
    return x


def by_row(condition: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A condition with one value for each row of `x` in a shape that torch
    takes so; any other one as it is."""
    if condition.dim() != 1 or x.dim() < 2:
        return condition
    return condition.reshape(-1, *(1,) * (x.dim() - 1))


def mod(x: torch.Tensor | float, y: torch.Tensor) -> torch.Tensor:
    """What is left of a division, with the sign of `y`; 0 where that is 0,
    of which torch makes no number."""
    if not isinstance(x, torch.Tensor):
        x = y.new_tensor(x)
    return torch.where(y == 0, x - x.detach(), torch.remainder(x, y))


def round_half_away(x: torch.Tensor) -> torch.Tensor:
    """To the nearest whole number, halves away from 0; torch's takes the
    even one."""
    whole = x.trunc()
    return whole + ((x - whole).abs() >= 0.5) * x.sign()


def round_half_down(x: torch.Tensor) -> torch.Tensor:
    """To the nearest whole number, halves to the smaller one; torch's takes
    the even one."""
    low, high = x.floor(), x.ceil()
    return torch.where(x - low <= high - x, low, high)


def gather_nd(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Parts of `x` at places whose first index is in the first row of
    `index`, and so on."""
    return x[tuple(index.long().unbind())]


def softmax_of_lengths(x: torch.Tensor, lengths: torch.Tensor, axis: int
                       ) -> torch.Tensor:
    """Over so many values along an axis; 0 behind them."""
    steps = torch.arange(x.shape[axis], device=x.device)
    shape = [1] * x.dim()
    shape[axis] = -1
    inside = steps.reshape(shape) < lengths.unsqueeze(axis)
    least = torch.finfo(x.dtype).min
    return x.masked_fill(~inside, least).softmax(axis) * inside


def sequence_mask(x: torch.Tensor, lengths: torch.Tensor, value: float,
                  axis: int) -> torch.Tensor:
    """`x`, with `value` at the steps of each sequence that are behind its
    length. Steps are its axis 0 or 1, sequences the other."""
    steps = torch.arange(x.shape[axis], device=x.device)
    inside = steps < lengths.to(x.device).long()[:, None]       # (N, T)
    if axis == 0:
        inside = inside.t()
    inside = inside.reshape(inside.shape + (1,) * (x.dim() - 2))
    return torch.where(inside, x, torch.full((), value, dtype=x.dtype,
                                             device=x.device))


def sequence_last(x: torch.Tensor, lengths: torch.Tensor, axis: int
                  ) -> torch.Tensor:
    """The last step of each sequence. Steps are its axis 0 or 1, sequences
    the other."""
    x = x.movedim(axis, 0)
    return x[lengths.long() - 1, torch.arange(x.shape[1], device=x.device)]


def sequence_reverse(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The steps of each sequence the other way round, up to its length. Steps
    are axis 0, sequences 1."""
    steps = torch.arange(x.shape[0], device=x.device)[:, None]
    n = lengths.long()
    return x[torch.where(steps < n, n - 1 - steps, steps),
             torch.arange(x.shape[1], device=x.device)]


def _heads(x: torch.Tensor, heads: int, parts: int) -> list[torch.Tensor]:
    """(T, N, heads * parts * D) in, each part as (N * heads, T, D) out."""
    steps, batch = x.shape[:2]
    x = x.reshape(steps, batch * heads, parts, -1)
    return [x[:, :, i].transpose(0, 1) for i in range(parts)]


def _joined(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(N * heads, T, D) in, (T, N, heads * D) out."""
    return x.transpose(0, 1).reshape(x.shape[1], x.shape[0] // heads, -1)


def selfatt_qk(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """The products of queries and keys: (T, N, heads * 3 * D) in,
    (N * heads, T, T) out."""
    q, k, _ = _heads(qkv, heads, 3)
    return q / q.shape[-1] ** 0.5 @ k.transpose(1, 2)


def selfatt_valatt(qkv: torch.Tensor, weights: torch.Tensor, heads: int
                   ) -> torch.Tensor:
    """The weighted values, (T, N, heads * D)."""
    return _joined(weights @ _heads(qkv, heads, 3)[2], heads)


def encdec_qk(q: torch.Tensor, kv: torch.Tensor, heads: int) -> torch.Tensor:
    """The products of queries and keys, of two sequences."""
    (q,), (k, _) = _heads(q, heads, 1), _heads(kv, heads, 2)
    return q / q.shape[-1] ** 0.5 @ k.transpose(1, 2)


def encdec_valatt(kv: torch.Tensor, weights: torch.Tensor, heads: int
                  ) -> torch.Tensor:
    """The weighted values of the other sequence."""
    return _joined(weights @ _heads(kv, heads, 2)[1], heads)


def dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As NumPy's: the last axis of `x` with the last but one of `y`."""
    if not x.dim() or not y.dim():
        return x * y
    if y.dim() < 3:
        return x @ y
    return torch.tensordot(x, y, ([-1], [-2]))


def pick(x: torch.Tensor, index: torch.Tensor, axis: int, keepdims: bool,
         mode: str) -> torch.Tensor:
    """One element along an axis. An index out of range is the nearest
    ("clip") or counts on from the other end ("wrap")."""
    n, index = x.shape[axis], index.long()
    index = index.remainder(n) if mode == "wrap" else index.clamp(0, n - 1)
    if index.dim() < x.dim():
        index = index.unsqueeze(axis)
    found = x.gather(axis, index)
    return found if keepdims else found.squeeze(axis)


def one_hot(index: torch.Tensor, depth: int, on: float, off: float,
            dtype: str) -> torch.Tensor:
    """`on` at the index along a new last axis, `off` elsewhere."""
    hot = index.long()[..., None] == torch.arange(depth, device=index.device)
    kind = getattr(torch, dtype)
    return torch.where(hot, torch.tensor(on, dtype=kind),
                       torch.tensor(off, dtype=kind))


def topk(x: torch.Tensor, k: int, axis: int, ascending: bool, kind: str,
         dtype: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest along an axis, or the smallest: their values, their
    indices, or both. Of equal ones the first comes first."""
    found = x.sort(dim=axis, descending=not ascending, stable=True)
    values = found.values.narrow(axis, 0, k)
    indices = found.indices.narrow(axis, 0, k).to(getattr(torch, dtype))
    if kind == "both":
        return values, indices
    return values if kind == "value" else indices


def arange_like(x: torch.Tensor, start: float, step: float, axis: int | None
                ) -> torch.Tensor:
    """Numbers in the shape of `x`, or as many as it has along an axis."""
    n = x.numel() if axis is None else x.shape[axis]
    found = start + step * torch.arange(n, dtype=x.dtype, device=x.device)
    return found.reshape(x.shape) if axis is None else found
