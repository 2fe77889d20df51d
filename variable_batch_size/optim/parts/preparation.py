"""Flush, Rounds and LayerSwitch: what the next minibatch needs on XLA, in lockstep and of norm layers."""

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.gradients.accumulator import GradientAccumulator
from variable_batch_size.optim.norm_layers import NormLayers
from variable_batch_size.optim.parts.part import Part


class Flush(Part):
    """On XLA, where several minibatches would otherwise be one graph, of another number each."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def before_minibatch(self, upcoming: StepPlan | None) -> None:
        self._communicator.flush()


class Rounds(Part):
    """In lockstep: lets the sharded model know whether the next minibatch is padding, and whether it ends the step."""

    def __init__(self, gradients: GradientAccumulator) -> None:
        self._gradients = gradients

    def before_minibatch(self, upcoming: StepPlan | None) -> None:
        plan = upcoming or StepPlan(1)
        self._gradients.begin_minibatch(is_padding=plan.is_padding, is_last=plan.is_last)


class LayerSwitch(Part):
    """Measures the samples' gradients of norm layers in some steps only."""

    def __init__(self, layers: NormLayers) -> None:
        self._layers = layers

    def before_minibatch(self, upcoming: StepPlan | None) -> None:
        self._layers.expect(upcoming)
