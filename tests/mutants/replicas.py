"""Replicas that are not copies of one network."""
from mutants.planting import Mutant, edit

_REPLICAS = "mgpu.replicas:Replicas."

MUTANTS = [
    Mutant("replica-aliased", "all devices hold the user's own module",
           edit("mgpu.backends._torch.network:TorchNetwork.replicate",
                "copy.deepcopy(self.net)", "self.net"),
           ("test_replicas.py::test_devices_do_not_share_memory[torch]",)),
    Mutant("each-device-draws", "devices start from different weights",
           edit(_REPLICAS + "_complete", "self.backend.put(values[spec.name],",
                "self.backend.put(values[spec.name] if spec.kind != 'weight' "
                "else np.random.default_rng(replica.index).normal(0, 0.01, "
                "spec.shape),"),
           ("test_replicas.py::test_every_device_and_engine_start_from_the_"
            "drawn_bits[torch-2dev-None]",)),
    Mutant("import-on-one-device", "the other devices keep their values",
           edit(_REPLICAS + "import_numpy", "enumerate(own[name].list_data())",
                "enumerate(own[name].list_data()[:1])"),
           ("test_replicas.py::test_values_cross_engines_and_device_counts"
            "[torch-torch]",)),
    Mutant("set-data-on-one-device", "the other devices keep their values",
           edit("mgpu.parameters:Parameter.set_data", "for x in arrays:",
                "for x in arrays[:1]:"),
           ("test_replicas.py::test_writing_a_parameter[torch-2dev]",)),
    Mutant("zero-grad-on-one-device", "the other devices keep theirs",
           edit("mgpu.parameters:Parameter.zero_grad",
                "for g in self.list_grad():", "for g in self.list_grad()[:1]:"
                ), ("test_replicas.py::test_zero_grad[torch-2dev]",)),
    Mutant("get-params-aliases", "the device trains the caller's arrays",
           edit("mgpu.parameters:get_params", "copies = every = "
                "[backend.put(p, device) for p in params]", "copies = every = "
                "[p if backend.is_native(p) else backend.put(p, device) "
                "for p in params]"),
           ("test_replicas.py::test_get_params[torch-2dev]",)),
    Mutant("export-of-device-0", "statistics of the other devices are "
           "dropped in silence", edit(_REPLICAS + "export_numpy",
                                      "every.mean(axis=0)", "every[0]"),
           ("test_batch_norm.py::test_export_of_per_device_statistics_warns_"
            "and_averages[torch-2dev]",)),
    Mutant("recording-forgotten", "a device that ran counts as one without "
           "rows", edit(_REPLICAS + "_note",
                        "[i in active for i in range(len(self.devices))]",
                        "[False] * len(self.devices)"),
           ("test_trainer.py::test_a_step_without_a_backward_pass[torch-2dev-*"
            ,)),
]
