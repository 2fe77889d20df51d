"""The private names of other libraries, and the files that may use them. A new one needs discussion.

A name is private if it begins with an underscore, or if it is one of INTERNAL, which are also undocumented.
"""

import ast
import re
from pathlib import Path

import torch

import variable_batch_size

PACKAGE = Path(variable_batch_size.__file__).parent
FILES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}

PUBLIC = {"_asdict", "_exit", "_fields", "_replace", "_thread"}  # of NamedTuple, os and Python: documented
INTERNAL = {
    *("f_back", "f_globals", "f_locals", "get_objects", "get_referents", "get_referrers", "getrefcount"),  # CPython
    *("fsdp_params", "sharded_param", "unsharded_accumulated_grad", "split_factor"),  # FSDP2 and its placements
    *("auto_collation", "hooked"),  # a fetcher of DataLoader; the mark of a profiled Optimizer.step
}
OVERRIDDEN = {  # attributes that frameworks look up on our objects: defined by us, but named by them
    *("_batches_that_stepped", "_initial_epoch", "_is_accelerate_prepared", "_should_accumulate"),
    *("_step_supports_amp_scaling", "_symbolic_build"),
}
# ours, used outside of the file of its class
OWN = {
    "_checks",
    "_end_open_epoch",
    "_follow",
    "_follow_reassigned",
    "_on_first_read",
    "_on_request",
    "_reassign",
    "_runs",
    "_settle",
    "_wrappers",
}

# five files are for private names; the files below them are exceptions, each with its reason
TABLE = {
    "optim/wrappers.py": {
        # no public API tells which parameters a module shards
        *("_get_fsdp_state", "_fsdp_param_group", "_fsdp_param_groups", "fsdp_params", "sharded_param"),
        *("_fsdp_flattened", "_PipelineStageBase"),  # FSDP1 and pipelines, to refuse them
        "_join_config",  # whether DDP waits for other ranks in its forward pass, to refuse that
        "_composable",  # where fully_shard was before torch 2.6
        *("_composable_state", "_module_state_mapping"),  # torch's list of the modules of fully_shard
        *("_getframe", "f_back", "f_globals", "f_locals"),  # whether a pipeline or Accelerate calls
        "_clear_cache",  # ZeroRedundancyOptimizer cannot remove a group that was added
    },
    "optim/gradients/fsdp.py": {
        "_backward_hooks",  # to replace the hooks of an earlier optimizer
        *("_unsharded_param", "unsharded_accumulated_grad"),  # no public API has gradients that are not reduced yet
        *("_foreach_add_", "_foreach_mul_"),
    },
    "cores/cuda_operations.py": {"_compile_kernel"},  # torch has no public way to compile a kernel without a compiler
    "cores/xla.py": {
        *("_XLAC", "_get_xla_op_sharding", "_xla_mark_sharding"),  # to shard a buffer like its parameter
        *("_internal", "_run_thread_per_device"),  # to run some of the cores of a host
    },
    "experimental/tpu/tpu_compiler.py": {"_jax", "_src"},  # the versions of jax and libtpu are in that file
    "integrations/accelerate.py": {
        "_is_accelerate_prepared",
        "_optimizers",  # FSDP2 needs an optimizer that is prepared, which this library then takes back
        "_step_supports_amp_scaling",
    },
    "integrations/keras.py": {
        *("_call_has_training_arg", "_flatten_layers", "_initial_epoch", "_loss_tracker", "_symbolic_build"),
    },
    "integrations/lightning.py": {
        *("_TrainingEpochLoop", "_accelerator_connector", "_batches_that_stepped", "_checkpoint_connector"),
        *(
            "_combined_loader",
            "_data_fetcher",
            "_loaded_checkpoint",
            "_on_after_fetch",
            "_on_before_fetch",
            "_should_accumulate",
        ),
        *("_start_profiler", "_stop_profiler"),
    },
    "integrations/transformers.py": {
        "_prepare_inputs",  # documented for subclasses of Trainer
        *("_get_dataloader", "_get_train_sampler"),  # subclasses override them to draw samples, which is refused
    },
    # ------------------------------------------------------------------------------------------------------ exceptions
    "cores/detect.py": {"_get_default_store"},  # no public API has the store of the processes
    "cores/dtensor.py": {
        "_tensor",  # the module of DTensor before torch 2.5
        *("_utils", "split_factor"),  # the slice of a full tensor that is this rank's shard, without a collective
    },
    "cores/signals.py": {
        *("_getframe", "_target", "_worker_loop", "f_locals"),  # whether a fork starts a worker of DataLoader
    },
    "data/sampler.py": {
        *(
            "_getframe",
            "f_globals",
            "f_locals",
        ),  # whether the loader would merge minibatches, and how far it prefetches
    },
    "data/stream.py": {
        *("_utils", "_worker_info"),  # samples must not shard themselves a second time
        *("_getframe", "auto_collation", "f_locals"),  # whether the loader would merge minibatches
    },
    "optim/buffers.py": {"_buffers", "_version"},  # the owner of a buffer, and whether it was written to
    "optim/forward_state.py": {"_buffers", "_version"},  # likewise
    "optim/gradients/accumulator.py": {"_foreach_div"},
    "optim/gradients/buckets.py": {  # one kernel for many tensors
        *("_foreach_add_", "_foreach_copy_", "_foreach_mul", "_foreach_mul_"),
    },
    "optim/gradients/fixed_point.py": {"_foreach_add_", "_foreach_copy_", "_foreach_norm", "_foreach_sub_"},
    "optim/gradients/gradient_buckets.py": {
        *("_C", "_cdata", "_storage_Use_Count", "_version", "getrefcount"),  # whether a gradient is still referenced
        *("_foreach_add_", "_foreach_copy_"),
    },
    "optim/gradients/norms.py": {"_foreach_norm", "_schema"},  # whether it accepts a dtype: since torch 2.5
    "optim/hyperparameters.py": {
        *("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"),  # a hook that precedes those of the user
        *("_foreach_add_", "_foreach_copy_", "_foreach_div", "_foreach_mul_", "_foreach_norm", "_foreach_sqrt_"),
    },
    "optim/loss_scale.py": {"_foreach_mul_"},
    "optim/module_hooks.py": {"_forward_pre_hooks"},  # to replace the hook of an earlier optimizer
    "optim/norm_layers.py": {"_forward_hooks"},  # likewise
    "optim/lr_scheduler.py": {"_last_lr", "_milestones", "_schedulers"},  # schedulers composed of others
    "optim/engine.py": {"_C", "_set_grad_enabled"},  # takes a third of the time of the public one
    "optim/optimizer.py": {
        # hooks of a step() that torch does not wrap; GradScaler reads the last one
        *("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks", "hooked", "_step_supports_amp_scaling"),
        "_disable_dynamo",  # the public decorator would import the compiler together with the package
        # hooks of a state dict that has more than torch's
        *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
        *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
    },
    "optim/probe.py": {"hooked"},  # to make a step without the hooks of all optimizers
    "runs/remote.py": {"_register_atexit"},  # atexit is too late to start a thread, which an upload may need
    "runs/sharded_state.py": {
        "_metadata",
        "_orig_mod",
        "_orig_module",
    },  # state dicts; prefixes added by wrappers
    "runs/state_file.py": {"_extra_state", "_metadata"},  # the versions of modules in a state dict
    "runs/store.py": {"_opt_called"},  # otherwise a loaded scheduler would warn
}


def attributes_of_torch():
    """The private attributes of torch objects that may coincide with our own names."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([parameter], lr=0.1)
    things = [torch.nn.Module(), parameter, inner, torch.optim.lr_scheduler.StepLR(inner, 1)]
    return {name for thing in things for name in [*dir(thing), *vars(thing)] if is_private(name)}


def is_private(name):
    return name in INTERNAL or (name.startswith("_") and not name.startswith("__") and name != "_")


def is_self(node):
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return is_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


def defined_in(tree):
    """The functions, classes and variables of a file, and the attributes of its objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def imported_in(tree):
    """The names that a file imports from other libraries."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) or (
            isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("variable_batch_size")
        ):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)


def root_of(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def used_in(tree):
    """Each used private name, and whether it is an attribute of self; None for what is in an imported module."""
    imported = set(imported_in(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, None if root_of(node) in imported else is_self(node.value)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("variable_batch_size"):
            yield from ((part, False) for part in (node.module or "").split("."))
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((part, False) for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            yield from ((part, False) for part in node.value.split("."))  # for getattr, hasattr and sys.modules
        elif isinstance(node, ast.ClassDef):
            targets = [target for part in node.body if isinstance(part, ast.Assign) for target in part.targets]
            yield from ((target.id, False) for target in targets if isinstance(target, ast.Name))


def found_in(tree, inherited, of_torch):
    """The private names of other libraries in a file; attributes of self may be inherited names of our own."""
    own = set(defined_in(tree))
    used = {(name, of_self) for name, of_self in used_in(tree) if is_private(name) and name not in PUBLIC}
    ours = {None: set(), True: own | inherited | OWN, False: (own - of_torch) | OWN}
    return {name for name, of_self in used if name not in ours[of_self]} | (own & OVERRIDDEN)


def test_every_private_name_of_another_library_is_in_the_table_with_its_file():
    inherited, of_torch = {name for tree in FILES.values() for name in defined_in(tree)}, attributes_of_torch()
    found = {name: names for name, tree in FILES.items() if (names := found_in(tree, inherited, of_torch))}
    assert found == TABLE


def test_scan_detects_every_use_of_a_private_name():
    program = """
import torch._one
from torch import _two
from torch._three import public
tensor._four
getattr(tensor, "_five")
sys.modules.get("torch._six.public")
self._seven
super()._eight()
tensor._version
gc.get_referrers()
_nine = torch._nine
_ten = torch.nn._ten
torch._runs
class Own:
    _step_supports_amp_scaling = True
    def __init__(self):
        self._version = self._own = 0
"""
    found = found_in(ast.parse(program), set(), {"_version"})
    tricks = {"_nine", "_ten", "_runs", "_version", "get_referrers", "_step_supports_amp_scaling"}
    assert found == {"_one", "_two", "_three", "_four", "_five", "_six", "_seven", "_eight"} | tricks


def test_our_own_names_are_not_reported():
    program = """
class Own(Base):
    def __init__(self):
        self._own = self._inherited
        self._version = row._asdict()
other._own
"""
    assert found_in(ast.parse(program), {"_inherited"}, {"_version"}) == set()
