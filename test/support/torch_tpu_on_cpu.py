"""TorchTPU over XLA's CPU plugin instead of libtpu: the device "tpu" without a TPU, for tests.

All private names of torch_tpu that this project uses are in this file, as they were in version 0.2.0 (torch 2.13.0,
xla_cpu_pjrt 0.0.1).
"""

import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path

VERSION = "0.2.0"
# one TPU: found on the PCI bus by TorchTPU, which is why it must be set here
TOPOLOGY = "1,1,1"
# of the plugin, which would otherwise have one for each CPU: on two, copies to the host waited for each other forever
NUM_THREADS = "16"


class _Option(ctypes.Structure):
    """PJRT_NamedValue, with an integer."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("name_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("value", ctypes.c_int64),
        ("value_size", ctypes.c_size_t),
    )


class _Arguments(ctypes.Structure):
    """The first fields of PJRT_Client_Create_Args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("options", ctypes.POINTER(_Option)),
        ("num_options", ctypes.c_size_t),
    )


class _Functions(ctypes.Structure):
    """The first fields of PJRT_Api: sizes, the version, ten functions for errors, the plugin and events, one more."""

    _fields_ = (("sizes", ctypes.c_void_p * 5), ("others", ctypes.c_void_p * 10), ("create_client", ctypes.c_void_p))


_CreateClient = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Arguments))
_kept = []  # what the plugin refers to


def _have_one_device(plugin):
    """Let the plugin start with one device, as a process of TorchTPU needs it, instead of four.

    The number is an option of PJRT's function that makes a client, and no environment variable is read for it. TorchTPU
    passes one option, which this plugin does not have.
    """
    library = ctypes.CDLL(plugin)
    library.GetPjrtApi.restype = ctypes.POINTER(_Functions)
    functions = library.GetPjrtApi().contents
    create, name = _CreateClient(functions.create_client), b"cpu_device_count"
    option = _Option(ctypes.sizeof(_Option), None, name, len(name), 1, 1, 1)  # of type int64: one of one value

    def with_one_device(arguments):
        arguments.contents.options, arguments.contents.num_options = ctypes.pointer(option), 1
        return create(arguments)

    replacement = _CreateClient(with_one_device)
    _kept.extend([option, create, replacement])
    functions.create_client = ctypes.cast(replacement, ctypes.c_void_p).value


def start():
    """Register the device "tpu" in this process."""
    if "torch_tpu" in sys.modules:  # imported by torch, and has loaded libtpu
        raise RuntimeError("set TORCH_DEVICE_BACKEND_AUTOLOAD=0 before torch is imported, as `make torchtpu` does")
    plugin = Path(find_spec("xla_plugins.xla_cpu_pjrt").origin).with_name("xla_cpu_pjrt.so")
    os.environ |= {
        "TPU_LIBRARY_PATH": str(plugin),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TORCH_TPU_TOPOLOGY": TOPOLOGY,
        "PJRT_NPROC": NUM_THREADS,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    from torch_tpu import _loader
    from torch_tpu._internal.utils import hardware

    hardware.get_tpu_device_count = lambda: 1
    _loader._init_device("tpu")
    _have_one_device(str(plugin))


def num_programs():
    """How many programs were compiled so far in this process."""
    import torch

    torch.accelerator.synchronize()
    return torch.tpu._get_cache_misses()
