"""Runs with Accelerate, and the same with a hand-written loop; on any number of processes."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from small_runs import classified, sgd
from torch import nn
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from variable_batch_size.integrations.accelerate import prepare, shard

MINIBATCH = 4
REF_BATCHSIZE = 16
# two epochs of 64 samples, of six and four steps; with two processes also idle and uneven ones
TRACE = [8, 16, 4, 20, 12, 4, 24, 8, 4, 20]
RULES = {"linear": vbs.LinearRuleOptimizer, "adascale": vbs.AdaScaleOptimizer}


def dataset():
    return classified(64, 6, num_classes=3, dtype=torch.float32)


class Session:
    """A model, an optimizer, a loader and a scheduler."""

    def __init__(self, rule, *, device="cpu", dropout=0.0, sharded_by=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).to(device)
        data = dataset()
        self.sampler = vbs.CustomSampler(data, trace=TRACE, minibatch_size=MINIBATCH)
        self.loader = DataLoader(data, batch_sampler=self.sampler)
        inner = sgd(self.model, momentum=0.9)
        if sharded_by is not None:
            self.model, inner = shard(sharded_by, self.model, inner)
        self.optimizer = RULES[rule](
            inner, self.sampler, ref_batchsize=REF_BATCHSIZE, model=self.model, clip_grad_norm=0.5
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(inner, 3, gamma=0.5)

    def train(self, backward, stop_at=None):
        """Train to the end, or for some steps; scheduler.step() is unconditional, as with Accelerate."""
        for _ in self.optimizer.epochs(2):
            for data, target in self.loader:
                backward(nn.functional.cross_entropy(self.model(data), target))
                self.optimizer.step()
                self.scheduler.step()
                if self.optimizer.updated and self.optimizer.steps_done == stop_at:
                    return self
        return self

    def found(self):
        model = getattr(self.model, "module", self.model)
        values = {name: value.detach() for name, value in model.state_dict().items()}
        weights = {name: getattr(value, "full_tensor", value.clone)() for name, value in values.items()}
        steps = self.optimizer.steps_done
        return {"weights": weights, "steps": steps, "scheduler": self.scheduler.last_epoch}


def by_own_loop(rule):
    session = Session(rule)
    for _ in session.optimizer.epochs(2):
        for data, target in session.loader:
            nn.functional.cross_entropy(session.model(data), target).backward()
            if session.optimizer.step():
                session.scheduler.step()
    return session.found()


def prepared(rule, *, model_first=False, **options):
    """A fully prepared session; or with the model prepared by the accelerator, without the loader."""
    accelerator = Accelerator(cpu=True, **options.pop("accelerator", {}))
    session = Session(rule, device=accelerator.device, **options)
    if model_first:
        session.model = accelerator.prepare(session.model)
        things = prepare(accelerator, session.optimizer, session.scheduler)
        session.optimizer, session.scheduler = things
    else:
        things = prepare(accelerator, session.model, session.optimizer, session.loader, session.scheduler)
        session.model, session.optimizer, session.loader, session.scheduler = things
    return accelerator, session


def by_accelerate(rule, **options):
    accelerator, session = prepared(rule, **options)
    return session.train(accelerator.backward).found()


def stopped_and_resumed(folder, rule, num_steps, **options):
    """A run that the accelerator saved after some steps, and that resumes in another accelerator."""
    accelerator, session = prepared(rule, **options)
    session.train(accelerator.backward, stop_at=num_steps)
    accelerator.save_state(str(folder))
    accelerator, session = prepared(rule, **options)
    accelerator.load_state(str(folder))
    return session.train(accelerator.backward).found()


def use_fsdp2(accelerator, plugin):
    """What Accelerate does with the plugin on accelerators; on CPUs, it ignores it."""
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def sharded(rule, state_dict_type="FULL_STATE_DICT"):
    """A session whose model Accelerate has sharded."""
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=30, state_dict_type=state_dict_type
    )
    use_fsdp2(accelerator, plugin)
    session = Session(rule, sharded_by=accelerator)
    things = prepare(accelerator, session.model, session.optimizer, session.loader, session.scheduler)
    session.model, session.optimizer, session.loader, session.scheduler = things
    return accelerator, session


def in_shards(folder):
    """A complete run in FSDP2, resumed ones with both formats of its checkpoints, and the message for a wrong order."""
    try:
        accelerator, session = sharded("linear")
        found = [("linear", session.train(accelerator.backward).found())]
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            accelerator, session = sharded("adascale", kind)
            session.train(accelerator.backward, stop_at=4)
            accelerator.save_state(str(folder / kind))
            accelerator, session = sharded("adascale", kind)
            accelerator.load_state(str(folder / kind))
            found.append(("adascale", session.train(accelerator.backward).found()))
        return found, message_of(lambda: prepare(accelerator, Session("linear").optimizer))
    finally:
        AcceleratorState._reset_state(True)


def message_of(run):
    try:
        run()
    except ValueError as error:
        return str(error)
    return None


def all_runs(folder):
    """The results of one of several processes."""
    runs = [("linear", by_accelerate("linear")), ("adascale", by_accelerate("adascale", model_first=True))]
    runs.append(("adascale", stopped_and_resumed(folder, "adascale", 4)))
    runs_in_shards, message = in_shards(folder)
    return [*runs, *runs_in_shards], message
