"""The TPU compiler: compiles the programs that torch_xla dumps, on a machine without TPUs, with libtpu through jax.

This file is also a script for the Python of an environment with the PACKAGES, and imports nothing of this package. It
has all private names of jax and libtpu, and those of XLA's dumps, as seen in torch_xla 2.9.0 and in the versions below.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("jax==0.10.2", "libtpu==0.0.51")  # also the extra `tpu` of setup.cfg
_FORMAT = 1  # of cached records
_DUMPED = ".before_optimizations.hlo.pb"
_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8, "c64": 8, "c128": 16}
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][a-z-]*)\(", re.MULTILINE)
_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("collective-permute", "collective-broadcast"),
)


# --------------------------------------------------------------------------------------------------------------- dumps


def dump_flags(directory: Path) -> str:
    """``XLA_FLAGS`` with which a process writes every program that it compiles, and optimizes it only a little."""
    dumps = f"--xla_dump_to={directory} --xla_dump_hlo_as_proto --xla_dump_hlo_pass_re=NOTHING"
    return f"{os.environ.get('XLA_FLAGS', '')} {dumps} --xla_backend_optimization_level=0".strip()


def dumped_in(directory: Path) -> list[Path]:
    """The programs in the order in which they were compiled."""
    return sorted(directory.glob(f"*{_DUMPED}"), key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)])


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer: their numbers and values."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
            if byte < 128:
                return value

    while place < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        else:
            length = {1: 8, 5: 4}.get(kind) or varint()
            yield number, message[place : place + length]
            place += length


def module_of(dumped: bytes) -> bytes:
    """The module in a dumped HloProto."""
    return bytes(next(value for number, value in _fields(dumped) if number == 1))


def donated_of(module: bytes) -> list[int]:
    """The parameters of a module whose buffers its outputs may use."""
    entries = [
        dict(_fields(entry))
        for number, config in _fields(module)
        if number == 18  # buffer_donor, which the conversion to StableHLO leaves out
        for _, entry in _fields(config)
    ]
    return sorted({entry.get(1, 0) for entry in entries})


# --------------------------------------------------------------------------------------------------- compiled programs


def num_bytes(types: str) -> int:
    """The size of an HLO type, which may be a tuple.

    >>> num_bytes("(f32[16,10]{1,0:T(8,128)}, bf16[3]{0}, pred[])")
    647
    """
    total = 0
    for name, dimensions in re.findall(r"([a-z]+\d*)[a-z0-9]*\[([\d,]*)\]", types):
        size = _BYTES.get(name, 1 if name.endswith(("f8", "s8", "u8", "s4", "u4")) else 4)
        for dimension in filter(None, dimensions.split(",")):
            size *= int(dimension)
        total += size
    return total


def collectives_in(hlo: str) -> list[tuple[str, int]]:
    """Kind and size of the result, on a core, of each collective of a compiled program; asynchronous ones once."""
    found = [(operation.removesuffix("-done"), num_bytes(types)) for types, operation in _OPERATION.findall(hlo)]
    return [(kind, size) for kind, size in found if kind in _COLLECTIVES]


def host_transfers_in(hlo: str) -> int:
    """The number of operations of a compiled program that move data to or from the host while it runs."""
    on_host = [line for line in hlo.splitlines() if "is_host_transfer=true" in line or "MoveToHost" in line]
    return len(on_host) + sum(operation in ("infeed", "outfeed") for _, operation in _OPERATION.findall(hlo))


def doubles_in(stablehlo: str) -> int:
    """The number of operations on tensors of 64-bit floats, which TPUs emulate; single numbers do not count."""
    return sum(
        bool(re.search(r"tensor<(1x)*(?!1x)\d[\dx]*xf64>", line)) for line in stablehlo.splitlines() if " = " in line
    )


# ----------------------------------------------------------------------------------------------------------- compiling


def cached(directory: Path, parts: Sequence[str], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The record with the hash of these parts in a directory; made and written if there is none."""
    path = directory / f"{hashlib.sha256(json.dumps([_FORMAT, *parts]).encode()).hexdigest()}.json"
    if path.exists():
        return {**json.loads(path.read_text(encoding="utf-8")), "is_cached": True}
    record = make()
    directory.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(path)
    return {**record, "is_cached": False}


def versions() -> dict[str, str | None]:
    """The versions of the PACKAGES in this Python; None for a missing one."""
    found: dict[str, str | None] = {}
    for name in (package.partition("==")[0] for package in PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def topology_of(name: str) -> Any:
    """The devices of a topology such as v5e:2x4, on a machine without a TPU."""
    import libtpu

    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}  # ask no metadata server
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # another process may compile at the same time
    for variable, value in {
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_LIBRARY_PATH": os.path.join(os.path.dirname(libtpu.__file__), "libtpu.so"),
    }.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=name)


def compile_for(topology: Any, stablehlo: Any, donated: Sequence[int], *, is_spmd: bool) -> Any:
    """Compile a program for all devices of a topology, as replicas or, in SPMD mode, as partitions."""
    import numpy as np
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    devices = list(topology.devices)
    replicas, partitions = (1, len(devices)) if is_spmd else (len(devices), 1)
    options = xla_client.CompileOptions()
    for part in (options, options.executable_build_options):
        part.num_replicas, part.num_partitions = replicas, partitions
        ids = np.array([device.id for device in devices]).reshape(replicas, partitions)
        part.device_assignment = xla_client.DeviceAssignment.create(ids)
    options.executable_build_options.use_spmd_partitioning = is_spmd
    with mlir.make_ir_context():
        module = ir.Module.parse(stablehlo)
        main = next(part for part in module.body.operations if part.attributes["sym_name"].value == "main")
        has_attributes = "arg_attrs" in main.attributes
        attributes = list(main.arg_attrs) if has_attributes else [ir.DictAttr.get({})] * len(main.arguments)
        for place in donated:
            others = {attribute.name: attribute.attr for attribute in attributes[place]}
            attributes[place] = ir.DictAttr.get({**others, "jax.buffer_donor": ir.BoolAttr.get(True)})
        main.arg_attrs = ir.ArrayAttr.get(attributes)
        client = devices[0].client
        return client.compile(module, executable_devices=xla_client.DeviceList(tuple(devices)), compile_options=options)


def record_of(executable: Any) -> dict[str, Any]:
    """What the compiler reports about a program, for one core."""
    memory, costs = executable.get_compiled_memory_stats(), executable.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    hlo = executable.hlo_modules()[0].to_string()
    arguments = memory.argument_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes  # a donated buffer counts once
    in_use = max(memory.peak_memory_in_bytes, arguments + outputs + memory.temp_size_in_bytes)
    return {
        "memory": in_use + memory.generated_code_size_in_bytes,
        "arguments": arguments,
        "flops": max(0.0, costs.get("flops", 0.0)),
        "bytes_accessed": costs.get("bytes accessed", 0.0),
        "collectives": collectives_in(hlo),
        "host_transfers": host_transfers_in(hlo),
    }


def compiled(path: Path, topology: Any, name: str, *, is_spmd: bool, cache: Path) -> dict[str, Any]:
    """The record of a dumped program, or the error of the compiler."""
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jaxlib.mlir import ir

    module = module_of(path.read_bytes())
    donated, stablehlo = donated_of(module), _jax.mlir.hlo_to_stablehlo(module)
    with mlir.make_ir_context():
        text = str(ir.Module.parse(stablehlo))

    def make() -> dict[str, Any]:
        started = time.monotonic()
        try:
            record = record_of(compile_for(topology, stablehlo, donated, is_spmd=is_spmd))
        except Exception as error:  # of the compiler: the result for this program
            record = {"error": str(error)}
        seconds = time.monotonic() - started
        return {**record, "donated": len(donated), "doubles": doubles_in(text), "seconds_compiling": seconds}

    found = cached(cache, [text, str(donated), name, str(is_spmd), *map(str, versions().values())], make)
    return {"name": path.name.removesuffix(_DUMPED), **found}


def main(arguments: Sequence[str]) -> None:
    """``packages``, or ``compile TOPOLOGY CACHE replicas|partitions FILE…``: prints a JSON record in each line."""

    def show(record: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(record) + "\n")

    if arguments[0] == "packages":
        sys.stdout.write(" ".join(PACKAGES) + "\n")
        return
    if None in versions().values():
        show({"missing": [package for package, found in zip(PACKAGES, versions().values(), strict=True) if not found]})
        return
    _, name, cache, kind, *files = arguments
    try:
        topology = topology_of(name)
    except Exception as error:  # of many types, with the topologies that libtpu accepts
        show({"refused": str(error)})
        return
    show({"devices": len(topology.devices), "versions": versions()})
    for file in files:
        show(compiled(Path(file), topology, name, is_spmd=kind == "partitions", cache=Path(cache)))


if __name__ == "__main__":
    main(sys.argv[1:])
