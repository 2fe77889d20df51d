"""Digits of scikit-learn with a constant batch size, in plain PyTorch."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    dataset = torch.utils.data.TensorDataset(images[:1500], labels[:1500])

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    num_updates = 0
    for _ in range(6):
        for data, target in loader:
            cross_entropy(model(data), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            num_updates += 1

    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"{num_updates} updates, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
