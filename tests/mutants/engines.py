"""Engines that do not keep the contract."""
from mutants.planting import Mutant, edit

_TORCH = "mgpu.backends._torch:TorchBackend."
_MXNET = "mgpu.backends._mxnet:MXNetBackend."
_COPIES = "test_contract.py::test_put_always_copies["
_DROPOUT = "mgpu.backends._torch.network:_dropout_forward"

MUTANTS = [
    Mutant("torch-put-aliases", "a tensor that is there already is not copied",
           edit(_TORCH + "_put", "copy=True", "copy=False"),
           (_COPIES + "torch-native-target0-None]",)),
    Mutant("torch-put-shares-numpy", "a NumPy array and its tensor are one",
           edit(_TORCH + "_put", "base.host_array(x)", "np.asarray(x)"),
           (_COPIES + "torch-numpy-target0-None]",)),
    Mutant("torch-to-numpy-aliases", "the host sees later changes",
           edit(_TORCH + "to_numpy", ".numpy().copy()", ".numpy()"),
           ("test_contract.py::test_to_numpy_gives_a_fresh_copy[torch]",)),
    Mutant("torch-add-overwrites", "grad_req='add' forgets the old gradient",
           edit(_TORCH + "attach_grad", 'leaf.request == "write" and ', ""),
           ("test_contract.py::test_backward_writes_or_adds[torch-*",)),
    Mutant("torch-write-adds", "grad_req='write' keeps the old gradient",
           edit(_TORCH + "attach_grad", 'leaf.request == "write" and ',
                "False and "),
           ("test_contract.py::test_backward_writes_or_adds[torch-*",)),
    Mutant("torch-never-fresh", "nobody notes that a gradient arrived",
           edit(_TORCH + "attach_grad", "leaf.fresh = True", "pass"),
           ("test_contract.py::test_fresh_until_used[torch]",)),
    Mutant("torch-losses-averaged", "a loss is averaged over its rows",
           edit("mgpu.backends._torch:_total", "loss.sum()", "loss.mean()"),
           ("test_contract.py::test_each_loss_is_summed[torch-1dev-*",)),
    Mutant("torch-dropout-unscaled", "what is kept is not divided by its "
           "probability", edit(_DROPOUT, "x * mask.div_(keep) if keep else "
                               "x * mask", "x * mask"),
           ("test_replicas.py::test_channel_dropout_drops_channels[torch]",
            "test_replicas.py::test_dropout_is_reproducible_and_differs_"
            "between_devices[torch-2dev]")),
    Mutant("torch-dropout-alike", "all devices draw the same mask",
           edit(_TORCH + "generator", "device.index, (", "0, ("),
           ("test_replicas.py::test_dropout_is_reproducible_and_differs_"
            "between_devices[torch-2dev]",)),
    Mutant("torch-seed-ignored", "masks go on after a seed",
           edit(_TORCH + "seed", "self._generators.clear()", "pass"),
           ("test_contract.py::test_random_streams[torch-2dev]",)),
    Mutant("torch-results-in-no-order", "results of devices change places",
           edit("mgpu.backends._workers:_Call.outcome",
                "first_error_or(results, errors)",
                "first_error_or(results[::-1], errors)"),
           ("test_training.py::test_parallel[torch-2dev]",)),
    Mutant("an-error-is-swallowed", "what a device raised is lost",
           edit("mgpu.backends._workers:first_error_or", "error is not None",
                "False"),
           ("test_contract.py::test_the_first_exception_is_raised_after_all_"
            "have_run",)),
    Mutant("ctrl-c-is-forgotten", "Ctrl-C during an update has no effect",
           edit("mgpu.backends._workers:_uninterrupted",
                "before(*came[-1])", "pass"),
           ("test_trainer.py::test_ctrl_c_leaves_no_half_update[torch-2dev]",
            "test_contract.py::test_ctrl_c_comes_after_work_in_the_hosts_"
            "memory[torch]")),
    Mutant("mxnet-put-aliases", "an array that is there already is not copied",
           edit(_MXNET + "put", "x.copyto(context)",
                "x.as_in_context(context)"),
           (_COPIES + "mxnet-nd-native-target0-None]",)),
    Mutant("mxnet-loss-counts-once", "the same loss twice counts once",
           edit(_MXNET + "backward", "len(heads) < len(losses)", "False"),
           ("test_contract.py::test_the_same_loss_twice_counts_twice"
            "[mxnet-nd]",)),
    Mutant("mxnet-softplus-overflows", "large scores are infinite",
           edit("mgpu.backends._mxnet.ops:MXNetOps.softplus",
                "self.relu(x) + self._log1p(self.exp(-self.abs(x)))",
                "self._log1p(self.exp(x))"),
           ("test_contract.py::test_softplus_does_not_overflow_and_keeps_"
            "small_values[mxnet-nd]",)),
    Mutant("mxnet-pool-overlaps", "pooling moves by 1",
           edit("mgpu.backends._mxnet.ops:MXNetOps._pool",
                "size if stride is None else stride",
                "1 if stride is None else stride"),
           ("test_contract.py::test_ops_compute_as_numpy_does",)),
    Mutant("mxnet-bias-frozen-with-its-weight", "a bias does not learn where "
           "the weight is frozen", edit(
               "mgpu.backends._mxnet.network:MXNetNetwork._mend_frozen",
               "x.attach_grad()", "pass"),
           ("test_replicas.py::test_a_bias_learns_while_its_weight_is_frozen",
            )),
]
