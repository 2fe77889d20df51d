"""A GAN on a ring of points: two models, two optimizers, two losses, and one loader whose batch size grows.

python examples/gan.py
python examples/gan.py --cores 2    # the same result
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import softplus

import variable_batch_size as vbs

NOISE = 8


def ring(number: int) -> torch.Tensor:
    """Points at the distance 1 from the origin, with some noise."""
    generator = torch.Generator().manual_seed(0)
    angles = 2 * torch.pi * torch.rand(number, generator=generator)
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(number, 2, generator=generator)


def network(num_inputs: int, num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_outputs))


def train(num_epochs: int) -> tuple[float, int]:
    """The mean distance of generated points from the origin, which should be 1, and the number of updates."""
    torch.manual_seed(0)
    generator, critic = network(NOISE, 2), network(2, 1)
    loader = vbs.DataLoader(ring(8192), trace="0:64 256:128 512:256", minibatch_size=32)

    def optimizer_of(model: nn.Module) -> vbs.Optimizer:
        inner = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.99))
        # the noise of a minibatch depends on its place in the epoch, not on the core that runs it
        options = {"ref_batchsize": 64, "seed_minibatches": True, "model": model}
        return vbs.Optimizer(inner, loader, rule="adam:half-life", **options)

    critic_optimizer, generator_optimizer = optimizer_of(critic), optimizer_of(generator)
    for _ in critic_optimizer.epochs(num_epochs):
        for real in loader:
            fake = generator(torch.randn(len(real), NOISE))
            critic_loss = softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
            # both backward passes before the first step(): the generator's runs through the critic
            critic_loss.backward(inputs=list(critic.parameters()))
            softplus(-critic(fake)).mean().backward(inputs=list(generator.parameters()))
            critic_optimizer.step()
            generator_optimizer.step()
    with torch.no_grad():
        points = generator(torch.randn(2000, NOISE, generator=torch.Generator().manual_seed(1)))
    return points.norm(dim=1).mean().item(), generator_optimizer.steps_done


def main() -> None:
    parser = argparse.ArgumentParser(description="train a GAN with a growing batch size")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--cores", type=int, default=1)
    options = parser.parse_args()
    results = vbs.launch(train, (options.epochs,), cores=options.cores, backend="gloo")
    print("{1} updates of each model, mean distance of generated points {0:.3f}".format(*results[0]))


if __name__ == "__main__":
    main()
