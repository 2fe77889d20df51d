"""Digits of scikit-learn with a growing batch size, on two cores."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    dataset = torch.utils.data.TensorDataset(images[:1500], labels[:1500])

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    loader = vbs.DataLoader(dataset, trace="0:16 180:32 270:64", minibatch_size=16)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.Optimizer(inner, loader, rule="adascale", ref_batchsize=16, model=model)
    for _ in optimizer.epochs(6):
        for data, target in loader:
            cross_entropy(model(data), target).backward()
            optimizer.step()

    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    if loader.sampler.rank == 0:
        print(f"{optimizer.steps_done} updates, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    vbs.launch(main, cores=2, backend="gloo")
