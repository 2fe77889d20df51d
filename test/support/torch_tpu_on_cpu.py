"""TorchTPU over XLA's CPU plugin instead of libtpu: the device "tpu" without a TPU, for tests.

All private names of torch_tpu that this project uses are in this file, as they were in version 0.2.0 (torch 2.13.0,
xla_cpu_pjrt 0.0.1).
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

VERSION = "0.2.0"
# one TPU: found on the PCI bus by TorchTPU, which is why it must be set here
TOPOLOGY = "1,1,1"


def start():
    """Register the device "tpu" in this process."""
    if "torch_tpu" in sys.modules:  # imported by torch, and has loaded libtpu
        raise RuntimeError("set TORCH_DEVICE_BACKEND_AUTOLOAD=0 before torch is imported, as `make torchtpu` does")
    plugin = Path(find_spec("xla_plugins.xla_cpu_pjrt").origin).with_name("xla_cpu_pjrt.so")
    os.environ |= {
        "TPU_LIBRARY_PATH": str(plugin),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TORCH_TPU_TOPOLOGY": TOPOLOGY,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    from torch_tpu import _loader
    from torch_tpu._internal.utils import hardware

    hardware.get_tpu_device_count = lambda: 1
    _loader._init_device("tpu")


def num_programs():
    """How many programs were compiled so far in this process."""
    import torch

    torch.accelerator.synchronize()
    return torch.tpu._get_cache_misses()
