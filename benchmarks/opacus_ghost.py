"""Opacus' ghost clipping on a model of the same size, used as Opacus recommends.

Run by bench_clipping.py in `.venv/bench` (`make bench-opacus`); prints one JSON object. PyTorch's
ordinary step is measured too, because seconds of another framework are not comparable, but ratios
are. A unit is one row (Opacus supports no other), and the output projection has a separate table,
because ghost clipping omits the cross term of a tied one.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings

import torch
from cases import CASES, Case
from memory import PeakMemory
from opacus import PrivacyEngine
from torch import nn

warnings.simplefilter("ignore")
ENGINES = ("pytorch non-private", "opacus ghost")


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 64)
        self.qkv, self.attention_output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.intermediate, self.output = (
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )
        self.attention_norm, self.output_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, s, d = x.shape
        split = self.qkv(x).view(m, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*split)
        x = self.attention_norm(x + self.attention_output(mixed.transpose(1, 2).reshape(m, s, d)))
        inner = nn.functional.gelu(self.intermediate(x))
        return self.output_norm(x + self.output(inner))


class Bert(nn.Module):
    def __init__(self, c: Case) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(c.words, c.hidden), nn.Embedding(512, c.hidden)
        self.norm = nn.LayerNorm(c.hidden)
        self.blocks = nn.ModuleList(Block(c.hidden) for _ in range(c.layers))
        self.transform, self.transform_norm = nn.Linear(c.hidden, c.hidden), nn.LayerNorm(c.hidden)
        self.projection = nn.Linear(c.hidden, c.words)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
        x = self.norm(self.word(ids) + self.position(places))
        for block in self.blocks:
            x = block(x)
        x = x.gather(1, positions[:, :, None].expand(-1, -1, x.shape[2]))
        return self.projection(self.transform_norm(nn.functional.gelu(self.transform(x))))


class Step:
    """One optimizer step on one fixed batch."""

    def __init__(self, engine: str, c: Case) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Bert(c)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.private = engine == ENGINES[1]
        size = (c.rows, c.length)
        self.ids = torch.randint(0, c.words, size)
        self.positions = torch.randint(0, c.length, (c.rows, c.predictions))
        self.labels = torch.randint(0, c.words, (c.rows, c.predictions))
        if self.private:
            data = torch.utils.data.TensorDataset(self.ids, self.positions, self.labels)
            loader = torch.utils.data.DataLoader(data, batch_size=c.rows)
            self.model, self.optimizer, self.criterion, _ = PrivacyEngine().make_private(
                module=self.model,
                optimizer=self.optimizer,
                data_loader=loader,
                criterion=self.criterion,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                poisson_sampling=False,
                grad_sample_mode="ghost",
            )

    def __call__(self) -> float:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        logits = self.model(self.ids, self.positions)
        shape = {"shape": logits.shape} if self.private else {}
        loss = self.criterion(logits.flatten(0, 1), self.labels.flatten(), **shape)
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start


def side_by_side(c: Case, rounds: int) -> dict[str, dict[str, float]]:
    steps = {engine: Step(engine, c) for engine in ENGINES}
    seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for t in range(rounds + 1):
        for engine, step in steps.items():
            took = step()
            if t:
                seconds[engine].append(took)
    out = {}
    for engine, times in seconds.items():
        pairs = zip(times, seconds[ENGINES[0]], strict=True)
        out[engine] = {
            "update_seconds": statistics.median(times),
            "update_ratio": statistics.median(a / b for a, b in pairs),
            "rows_per_second": c.rows / statistics.median(times),
        }
    return out


def peak(engine: str, c: Case) -> dict[str, float]:
    step = Step(engine, c)
    memory = PeakMemory()
    for _ in range(3):
        step()
    return memory.figures()


def main() -> None:
    what, name = sys.argv[1:3]
    if what == "times":
        print(json.dumps(side_by_side(CASES[name], int(sys.argv[3]))))
    else:
        print(json.dumps(peak(sys.argv[3], CASES[name])))


if __name__ == "__main__":
    main()
