"""The older name of `mgpu.cli.compare`, `find` and `options`."""
from mgpu.cli.find import (Data, RandomBatches, factory, find, find_data,
                           find_loss)
from mgpu.cli.options import (parse_devices, parse_params, parse_shape,
                              read_map)
from mgpu.cli.compare import compare as parity, lint, print_findings, record

__all__ = ["Data", "RandomBatches", "factory", "find", "find_data",
           "find_loss", "lint", "parity", "parse_devices", "parse_params",
           "parse_shape", "print_findings", "read_map", "record"]
