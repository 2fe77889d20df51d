"""Reinforcement learning in the style of GRPO: answer, score, and train on as many minibatches as there are.

python examples/grpo.py                 # half a minute on a CPU
python examples/grpo.py --cores 2

Each prompt is a digit d, and the right answer is d times that digit. A small recurrent network answers each prompt
several times; an answer is rated by how much better it is than the others to the same prompt. Groups of equally good
answers teach nothing and are left out, and a minibatch has as many answers as fit into a number of tokens. So the
number of minibatches is not known in advance, and differs between cores: open steps.
"""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import variable_batch_size as vbs

END, DIGITS, LONGEST, WIDTH = 0, 6, 10, 64
GROUP, TOKENS = 16, 128  # answers to a prompt, and tokens of a minibatch

Answer = tuple[torch.Tensor, float]  # prompt and tokens, and its advantage


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS + 1, WIDTH)
        self.rnn, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, DIGITS + 1)

    def forward(self, tokens: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, state = self.rnn(self.embedding(tokens), state)
        return self.head(hidden), state


@torch.no_grad()
def answers(model: nn.Module, prompts: torch.Tensor) -> list[torch.Tensor]:
    """Each prompt with the tokens of an answer, including the end."""
    rows, token, state = [prompts], prompts, None
    for _ in range(LONGEST):
        logits, state = model(token[:, None], state)
        token = logits[:, 0].softmax(1).multinomial(1)[:, 0]
        rows.append(token)
    lengths = [row.index(END, 1) + 1 if END in row[1:] else len(row) for row in torch.stack(rows, 1).tolist()]
    return [row[:length] for row, length in zip(torch.stack(rows, 1), lengths, strict=True)]


def score(answer: torch.Tensor) -> float:
    """1 for the right answer, less for others."""
    digit, *given = answer.tolist()
    right = [digit] * digit + [END]
    same = sum(one == other for one, other in zip(given, right, strict=False))
    return same / max(len(given), len(right))


def group(model: nn.Module, digit: int) -> tuple[list[Answer], float]:
    """The answers to a prompt that teach something, and their mean score."""
    given = answers(model, torch.full((GROUP,), digit))
    scores = torch.tensor([score(one) for one in given])
    spread, mean = float(scores.std()), float(scores.mean())
    advantages = ((scores - mean) / max(spread, 1e-6)).tolist()
    return (list(zip(given, advantages, strict=True)) if spread > 1e-3 else []), mean


def minibatches(found: list[Answer]) -> list[list[Answer]]:
    """Answers of similar length together, as many as fit into a minibatch."""
    parts: list[list[Answer]] = []
    for answer in sorted(found, key=lambda one: len(one[0])):
        if not parts or (len(parts[-1]) + 1) * len(answer[0]) > TOKENS:
            parts.append([])
        parts[-1].append(answer)
    return parts


def loss_and_weight(model: nn.Module, minibatch: list[Answer]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over all tokens of the answers, and their number."""
    rows, advantages = zip(*minibatch, strict=True)
    tokens = pad_sequence(rows, batch_first=True, padding_value=-1)
    is_target = tokens[:, 1:] >= 0
    logits, _ = model(tokens[:, :-1].clamp(min=0))
    logs = logits.log_softmax(2).gather(2, tokens[:, 1:, None].clamp(min=0))[:, :, 0]
    return -(logs * is_target * torch.tensor(advantages)[:, None]).sum(), is_target.sum()


def train(options: argparse.Namespace) -> list[tuple[str, str]]:
    prompts = torch.arange(options.prompts) % DIGITS + 1
    loader = vbs.DataLoader(prompts, vbs.OpenSteps(), minibatch_size=4)
    torch.manual_seed(0)
    model = Network()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = vbs.Optimizer(inner, loader, rule="constant", ref_batchsize=32, model=model)
    torch.manual_seed(loader.sampler.rank)  # different answers on each core
    scores, numbers = [], []
    for _ in optimizer.epochs(1):
        for read in loader:
            groups = [group(model, digit) for digit in read.tolist()]
            own = minibatches([answer for found, _ in groups for answer in found])
            for minibatch in optimizer.minibatches(own):
                loss, weight = loss_and_weight(model, minibatch)
                loss.backward()
                optimizer.step(weight=weight)
            scores += [mean for _, mean in groups]
            numbers.append(len(own))
    tenth = max(1, len(scores) // 10)
    return [
        ("updates", f"{optimizer.steps_done:,}"),
        ("minibatches", f"{min(numbers)} to {max(numbers)} in a step of core {loader.sampler.rank}"),
        ("tokens", f"{optimizer.weight_done:,.0f}"),
        (
            "score",
            f"{sum(scores[:tenth]) / tenth:.2f} in the first tenth, {sum(scores[-tenth:]) / tenth:.2f} in the last",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2400, help="how many to answer")
    parser.add_argument("--cores", type=int, default=1, help="number of processes")
    options = parser.parse_args()
    tables = vbs.launch(train, (options,), cores=options.cores) if options.cores > 1 else [train(options)]
    for name, value in tables[0]:
        print(f"{name:<14}{value}")


if __name__ == "__main__":
    main()
