"""Train MNIST with a variable batch size: on TPU cores, virtual XLA cores, under torchrun, or in one process.

python test/variable_train_mnist.py --datadir DIR                       # 8 XLA cores, virtual ones without a TPU
torchrun --nproc-per-node=2 test/variable_train_mnist.py --datadir DIR  # processes of torch.distributed
python test/variable_train_mnist.py --datadir DIR --backend none        # one process
"""

import argparse
import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, Subset, TensorDataset

import variable_batch_size as vbs

TRACES = Path(__file__).parent.parent / "traces"

OPTIMIZERS = {
    "linear": vbs.LinearRuleOptimizer,
    "root": vbs.RootRuleOptimizer,
    "constant": vbs.ConstantOptimizer,
    "linear_momentum": vbs.LinearRuleMomentumOptimizer,
    "adascale": vbs.AdaScaleOptimizer,
}

EXIT_MISSED = 21


def parse_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train MNIST with a variable batch size.")
    parser.add_argument("--datadir", default="data", help="where torchvision finds MNIST, or puts it")
    parser.add_argument("--download", action="store_true", help="get MNIST if it is not there")
    parser.add_argument("--fake_data", action="store_true", help="black images, for a look at the speed")
    parser.add_argument("--batch_size", type=int, default=32, help="samples that one core runs at once")
    parser.add_argument("--trace", help="the batch size of every step, over all cores (default: one for the data)")
    parser.add_argument("--rule", choices=OPTIMIZERS, default="linear", help="how the learning rate follows it")
    parser.add_argument("--ref_batchsize", type=int, default=128, help="the batch size that --lr is right for")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--exact", action="store_true", help="the same weights to the last bit on any number of cores")
    parser.add_argument("--target_accuracy", type=float, default=97.0, help="exit with 21 below so many per cent")
    parser.add_argument("--num_cores", type=int, default=8, help="ignored under torchrun, which has started them")
    parser.add_argument("--backend", choices=["xla", "gloo", "nccl", "none"], help="none: this process alone")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that load data, for each core")
    parser.add_argument("--drop_last", action="store_true", help="test with whole minibatches only")
    parser.add_argument("--log_steps", type=int, default=20, help="steps from one record to the next")
    parser.add_argument("--logdir", help="for TensorBoard files and log.jsonl")
    parser.add_argument("--checkpoint_dir", help="save here, and resume from what is there")
    parser.add_argument("--metrics_debug", action="store_true", help="print what torch_xla has counted")
    return parser.parse_args(arguments)


# --------------------------------------------------------------------------------------------------------- data, model


def mnist(datadir: str, download: bool) -> list[TensorDataset]:
    from torchvision.datasets import MNIST

    parts = [MNIST(datadir, train=is_train, download=download) for is_train in (True, False)]
    return [TensorDataset(part.data.unsqueeze(1), part.targets) for part in parts]


def digits() -> list[TensorDataset]:
    """scikit-learn's 1,797 digits of 8 × 8 pixels, enlarged to the size of MNIST's."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels * (255 / 16), dtype=torch.uint8).view(-1, 1, 8, 8)
    images = pad(images.repeat_interleave(3, dim=2).repeat_interleave(3, dim=3), (2, 2, 2, 2))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], torch.tensor(labels)[order]
    return [TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])]


def fake(num_samples: int) -> TensorDataset:
    images = torch.zeros(1, 1, 28, 28, dtype=torch.uint8).expand(num_samples, -1, -1, -1)
    return TensorDataset(images, torch.zeros(num_samples, dtype=torch.int64))


def has_mnist(datadir: str) -> bool:
    return (Path(datadir) / "MNIST" / "raw").is_dir()


def load_data(flags: argparse.Namespace) -> list[TensorDataset]:
    """The training data and the test data."""
    if flags.fake_data:
        return [fake(60_000), fake(10_000)]
    if flags.download or has_mnist(flags.datadir):
        return mnist(flags.datadir, flags.download)
    return digits()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.linear1 = nn.Linear(320, 50)
        self.linear2 = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = (images.float() / 255 - 0.1307) / 0.3081
        x = torch.relu(torch.max_pool2d(self.conv1(x), 2))
        x = torch.relu(torch.max_pool2d(self.conv2(x), 2))
        return self.linear2(torch.relu(self.linear1(x.flatten(1))))


# ------------------------------------------------------------------------------------------------- what each core does


def train(flags: argparse.Namespace, model: nn.Module) -> float:
    """Train, and return the test accuracy after the last epoch in percent."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train_data, test_data = load_data(flags)
    device = vbs.device()
    model = model.to(device)
    if flags.exact and device.type == "cpu":
        torch.set_num_threads(1)  # results depend on it bit by bit, and launchers set it differently

    sampler = vbs.CustomSampler(train_data, trace=flags.trace, minibatch_size=flags.batch_size)
    loader = DataLoader(train_data, batch_sampler=sampler, num_workers=flags.num_workers)
    inner = torch.optim.SGD(model.parameters(), lr=flags.lr, momentum=flags.momentum)
    kind = OPTIMIZERS[flags.rule]
    optimizer = kind(inner, sampler, ref_batchsize=flags.ref_batchsize, model=model, exact=flags.exact)
    num_tested = len(test_data) // flags.batch_size * flags.batch_size if flags.drop_last else len(test_data)
    test_loader = vbs.EvaluationLoader(Subset(test_data, range(num_tested)), minibatch_size=flags.batch_size)

    sinks = [vbs.ProgressBar(sampler.schedule.steps(flags.num_epochs - 1).stop)]
    if flags.logdir:
        sinks += [vbs.TensorBoard(flags.logdir), vbs.JsonLines(f"{flags.logdir}/log.jsonl")]
    checkpoint = vbs.Checkpoint(flags.checkpoint_dir, model=model, optimizer=optimizer, every_seconds=60)
    accuracy = None
    with vbs.Log(optimizer, every=flags.log_steps, to=sinks) as log:
        for epoch in checkpoint.epochs(flags.num_epochs):
            model.train()
            for images, labels in loader:
                loss = cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                log.step(loss)
                checkpoint.step()
            accuracy = test(model, test_loader, device)
            log.write(accuracy=accuracy)
            if sampler.rank == 0:
                print(f"epoch {epoch}: {accuracy:.2f} % after {optimizer.samples_done:,} samples", file=sys.stderr)

    if flags.metrics_debug and device.type == "xla" and sampler.rank == 0:
        import torch_xla.debug.metrics

        print(torch_xla.debug.metrics.metrics_report())
    # a completed run has no epochs left
    return test(model, test_loader, device) if accuracy is None else accuracy


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """The accuracy over the shards of all cores in percent."""
    model.eval()
    metrics = vbs.Metrics("correct", "seen", device=device)
    for images, labels in loader:
        is_right = model(images.to(device)).argmax(1) == labels.to(device)
        metrics.add(correct=is_right.sum(), seen=len(labels))
    sums = metrics.read()
    return 100 * sums["correct"] / sums["seen"]


# -------------------------------------------------------------------------------------------------------------- launch


def main() -> None:
    flags = parse_flags()
    is_first = os.environ.get("RANK", "0") == "0"  # torchrun starts this script once for every core
    is_digits = not (flags.fake_data or flags.download or has_mnist(flags.datadir))
    if is_digits and is_first:
        print(f"No MNIST in {flags.datadir} (--download gets it): training on scikit-learn's digits.")
    flags.trace = flags.trace or str(TRACES / ("stages.csv" if is_digits else "mnist.csv"))

    torch.manual_seed(0)
    model = Network()  # before the launch, so that every run starts from the same weights
    if flags.backend == "none":
        accuracies = [train(flags, model)]
    else:
        accuracies = vbs.launch(
            train, (flags, model), cores=flags.num_cores, backend=flags.backend or default_backend()
        )

    has_missed = accuracies[0] < flags.target_accuracy
    if is_first:
        print(f"Test accuracy: {accuracies[0]:.2f} %")
    if has_missed and is_first:
        print(f"The accuracy of {accuracies[0]:.2f} % is below the target of {flags.target_accuracy:.2f} %.")
    if has_missed:
        sys.exit(exit_code_of_a_miss())


def default_backend() -> str | None:
    """XLA if torch_xla is installed, as in the original script, with virtual cores if there is no TPU."""
    return "xla" if find_spec("torch_xla") and "TORCHELASTIC_RUN_ID" not in os.environ else None


def exit_code_of_a_miss() -> int:
    """0 if torchrun restarts failures: otherwise it would restart the completed run repeatedly."""
    return 0 if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) else EXIT_MISSED


if __name__ == "__main__":
    main()
