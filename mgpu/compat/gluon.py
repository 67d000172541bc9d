"""Names of Gluon on `Replicas` and `Trainer`, and its functions."""
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mgpu.arguments import is_number
from mgpu.backends import messages

if TYPE_CHECKING:
    from mgpu.replicas import Replicas  # noqa: F401
    from mgpu.trainer import Trainer    # noqa: F401

#: stores of one process, which give the same sums
_STORES = ("device", "local", "local_update_cpu", "local_allreduce_cpu",
           "local_allreduce_device")
#: families whose constructor in Gluon hands a default rate on, which replaces
#: the base_lr of a schedule (`adamw` is no optimiser there: it is adam's)
_OWN_RATE = ("adam", "adamw", "adamax", "nadam", "rmsprop", "signum")


class GluonNames:
    """Methods of a Gluon Block that `mgpu.Replicas` has too."""


class GluonTrainerNames:
    """What a Gluon Trainer takes and has, on `mgpu.Trainer`."""


def check_store(kvstore: Any, update_on_kvstore: Any,
                compression_params: Any, semantics: Any) -> None:
    """Refuse what would change numbers, or what mgpu does by another word."""
    if semantics in (*_STORES, "nccl") \
            or str(semantics).startswith("dist"):
        raise ValueError(
            "the fourth argument of mgpu.Trainer is semantics, not Gluon's "
            f"kvstore; received {semantics!r}. Write kvstore={semantics!r}, "
            "or leave it out.")
    name = kvstore if kvstore is None or isinstance(kvstore, str) \
        else getattr(kvstore, "type", kvstore)
    if isinstance(name, str) and name.startswith("dist"):
        raise ValueError(
            "several processes start together and join by "
            f"mgpu.distributed; received kvstore={name!r}. Call "
            "mgpu.distributed.init(), start with mgpu launch (--engine "
            "kvstore is MXNet's own server), and leave kvstore out.")
    if name == "nccl":
        raise ValueError("the cards' own collective is allreduce='native'; "
                         "received kvstore='nccl'. Use that, or 'auto'.")
    if name is not None and name not in _STORES:
        raise ValueError(f"unknown kvstore; received {kvstore!r}. Leave it "
                         "out: a Trainer sums as allreduce= says.")
    if update_on_kvstore not in (None, True, False):
        raise TypeError("update_on_kvstore must be True, False or None, and "
                        f"changes nothing; received {update_on_kvstore!r}.")
    if compression_params is not None:
        raise ValueError(
            "gradients are summed as they are; received compression_params="
            f"{compression_params!r}, which rounds them. Leave it out.")


def without_no_rule(family: Any, options: Mapping[str, Any],
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
    """Whether Gluon's optimiser writes its rate into its schedule, where the
    rate was `given` or is the default."""
    return family != "ftrl" and (given or family in _OWN_RATE)
