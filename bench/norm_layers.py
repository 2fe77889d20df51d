"""How well normalization layers predict the noise scale of all parameters, over the training of a GPT on characters.

python bench/norm_layers.py                                                      # a small one on a CPU: minutes
python bench/norm_layers.py --gpt2 --device cuda --steps 3000 --minibatch 8      # GPT-2 small, in bf16 autocast

Every step has several minibatches, so that both are measured: all parameters by the norms of the minibatches, the
layers by their samples. Prints both over the run, the correlation of their logarithms, and the slope.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import gpt
import torch

import variable_batch_size as vbs

sys.path.append(str(Path(__file__).parent.parent / "reproduce"))
import characters

BEGIN = 0.1  # the share of the run without points, in which the averages start


def correlation(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Of logarithms: Pearson's correlation, and the geometric mean of the ratio."""
    logs = torch.tensor(pairs, dtype=torch.float64).log()
    return float(torch.corrcoef(logs.T)[0, 1]), math.exp(float((logs[:, 0] - logs[:, 1]).mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt2", action="store_true", help="GPT-2 small instead of a small GPT")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minibatch", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=4, help="in a step")
    parser.add_argument("--smoothing", type=float, default=0.98)
    parser.add_argument("--every", type=int, default=25, help="steps between two points")
    options = parser.parse_args()
    torch.manual_seed(0)
    context = gpt.CONTEXT if options.gpt2 else 64
    text = characters.Text(characters.text_of_python(), torch.device(options.device), context=context)
    small = {"width": 64, "heads": 4, "layers": 3, "context": context}
    model = (gpt.GPT() if options.gpt2 else characters.GPT(**small)).to(options.device)
    loss_of = gpt.loss if options.gpt2 else characters.loss_of
    size = options.minibatch * options.minibatches
    sampler = vbs.CustomSampler(dataset_size=len(text), trace=size, minibatch_size=options.minibatch)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-4 if options.gpt2 else 1e-3)
    more = {"measure_noise": "norm layers", "smoothing": options.smoothing, "model": model}
    optimizer = vbs.Optimizer(inner, sampler, rule="constant", ref_batchsize=size, **more)  # type: ignore[arg-type]
    found = []
    optimizer.set_epoch(0)
    for indices in sampler:
        loss = loss_of(model, text(indices))
        loss.backward()
        if not optimizer.step() or optimizer.steps_done % options.every:
            continue
        report = optimizer.report()
        pair = report["noise_scale"], report["norm_layers_noise_scale"]
        slope, interval = report["norm_layers_slope"], (report["noise_scale_low"], report["noise_scale_high"])
        print(
            f"step {optimizer.steps_done:5}  loss {float(loss):.3f}  noise scale {pair[0]:8.1f} "
            f"({interval[0]:.1f} to {interval[1]:.1f})  of the layers {pair[1]:8.1f}  slope {slope:.2f}",
            flush=True,
        )
        if optimizer.steps_done > BEGIN * options.steps and all(0 < scale < math.inf for scale in pair):
            found.append(pair)
        if optimizer.steps_done >= options.steps:
            break
    value, slope = correlation(found)
    print(f"{len(found)} points: correlation {value:.3f}, slope {slope:.2f} (geometric mean)")


if __name__ == "__main__":
    main()
