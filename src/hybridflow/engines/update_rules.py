"""The update rules of optimizers by name: AdamW, AdamW with 8-bit moments, Muon, SGD.

    masters, their parameters ──make_rules──► one rule, or two (Muon for matrices, AdamW for the rest)
    rule.step()        a step on all masters that have a gradient
    read_state, write_state   what a checkpoint holds of a master: tensors of its shape, and a step count

Rules are torch optimizers over masters, which are whole tensors or this rank's pieces. All but Muon work on
one number at a time, so that pieces need no messages.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hybridflow.config.model import SCALE_BLOCK, OptimConfig
from hybridflow.distributed.shards import own_slices, placed_like

NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
"""Coefficients of Muon's iteration (Keller Jordan, 2024), those of torch.optim.Muon."""
_LARGEST = 448.0
_SMALLEST = 2.0**-9
"""Largest and smallest positive number of float8_e4m3fn."""
_LEAST_EXPONENT = -50
"""Exponent below which no scale goes: the square of a number of 8 bits is still exact in float32."""


def make_rules(
    masters: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    config: OptimConfig,
    apart: Collection[str] = (),
) -> list[Optimizer]:
    """Return the rules of `config.optimizer`, which together step each of the masters once.

    Weight decay is for matrices only. `apart` names embeddings and output heads, which Muon leaves to AdamW.
    """
    matrices = {name for name, master in masters.items() if master.ndim >= 2}
    if config.optimizer == "Muon":
        muon = [name for name in masters if parameters[name].ndim in (2, 3) and name not in apart]
        rest = {name: master for name, master in masters.items() if name not in muon}
        pairs = [(masters[name], parameters[name]) for name in muon]
        rules: list[Optimizer] = [Muon(pairs, config)] if pairs else []
        return rules + ([_adamw(rest, matrices, config)] if rest else [])
    if config.optimizer == "SGD":
        return [torch.optim.SGD(_groups(masters, matrices, config), lr=config.lr, momentum=config.momentum)]
    if config.optimizer == "AdamW8bit":
        return [AdamW8bit(_groups(masters, matrices, config), config)]
    return [_adamw(masters, matrices, config)]


def _groups(
    masters: Mapping[str, Tensor], matrices: Collection[str], config: OptimConfig
) -> list[dict[str, Any]]:
    decayed = [master for name, master in masters.items() if name in matrices]
    others = [master for name, master in masters.items() if name not in matrices]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(masters: Mapping[str, Tensor], matrices: Collection[str], config: OptimConfig) -> Optimizer:
    beta1, beta2 = config.betas
    return torch.optim.AdamW(
        _groups(masters, matrices, config), lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True
    )


def state_names(rule: Optimizer) -> tuple[str, ...]:
    """Return the names of a rule's tensors that have the shape of their master, as checkpoints have them."""
    if isinstance(rule, Muon):
        return ("momentum_buffer",)
    if isinstance(rule, torch.optim.SGD):
        return ("momentum_buffer",) if rule.param_groups[0]["momentum"] else ()
    return ("exp_avg", "exp_avg_sq")


def read_state(rule: Optimizer, master: Tensor, rest: torch.device) -> dict[str, Tensor]:
    """Return a rule's state of a master; before its first step zeros on `rest`, as rules themselves start."""
    entry: dict[str, Tensor] = rule.state.get(master) or {}
    if not entry:
        entry = {
            name: torch.zeros_like(master, memory_format=torch.preserve_format, device=rest)
            for name in state_names(rule)
        }
        if not isinstance(rule, (Muon, torch.optim.SGD)):
            entry = {"step": torch.zeros((), dtype=torch.float32, device=rest), **entry}
        write_state(rule, master, entry)
        return entry
    if isinstance(rule, AdamW8bit):
        return rule.unpacked(master)
    return entry


def write_state(rule: Optimizer, master: Tensor, entry: dict[str, Tensor]) -> None:
    """Make `entry` a rule's state of a master; an empty one is that before the first step."""
    if not entry:
        rule.state.pop(master, None)
    elif isinstance(rule, AdamW8bit):
        rule.state[master] = rule.packed(entry)
    else:
        rule.state[master] = entry


class AdamW8bit(Optimizer):
    """AdamW whose moments take 8 bits between steps, a quarter of their memory.

    The mean of gradients and the root of the mean of their squares are kept as float8_e4m3fn, with a scale
    for each block of 256 numbers that is a power of two (after Dettmers et al., 2110.02861, who use another
    code). A power of two makes packing exact for what was unpacked, so that a resumed run goes on with the
    same bits. A root above 0 is never rounded to 0. The update itself is computed before the moments are
    rounded, in the dtype of the masters.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig) -> None:
        super().__init__(groups, {"lr": config.lr, "weight_decay": 0.0})
        self.betas = tuple(config.betas)
        self.eps = config.eps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step on all masters that have a gradient."""
        beta1, beta2 = self.betas
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is None:
                    continue
                entry = read_state(self, master, master.device)
                mean = entry["exp_avg"].lerp_(master.grad, 1 - beta1)
                square = entry["exp_avg_sq"].mul_(beta2).addcmul_(master.grad, master.grad, value=1 - beta2)
                step = entry["step"].add_(1).double()  # stays on the device, which nothing waits for
                master.mul_(1 - group["lr"] * group["weight_decay"])
                root = (square / (1 - beta2**step)).sqrt_().add_(self.eps)
                master.sub_(mean * (group["lr"] / (1 - beta1**step)) / root)
                self.state[master] = self.packed(entry)

    def packed(self, entry: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state with moments in 8 bits."""
        mean, mean_exponents = pack(entry["exp_avg"])
        root, root_exponents = pack(entry["exp_avg_sq"].sqrt(), keep_positive=True)
        return {
            "step": entry["step"],
            "mean": mean,
            "mean_exponents": mean_exponents,
            "root": root,
            "root_exponents": root_exponents,
        }

    def unpacked(self, master: Tensor) -> dict[str, Tensor]:
        """Return the state of a master as AdamW has it, in the master's dtype and shape."""
        entry = self.state[master]
        root = unpack(entry["root"], entry["root_exponents"], master)
        return {
            "step": entry["step"],
            "exp_avg": unpack(entry["mean"], entry["mean_exponents"], master),
            "exp_avg_sq": root.square_(),
        }


def pack(values: Tensor, *, keep_positive: bool = False) -> tuple[Tensor, Tensor]:
    """Return (numbers [n·256] float8_e4m3fn, exponents of their scales [n] int16) of any tensor.

    With `keep_positive` a value above 0 stays above 0.
    """
    flat = values.reshape(-1)
    blocks = nn.functional.pad(flat, (0, -flat.numel() % SCALE_BLOCK)).unflatten(0, (-1, SCALE_BLOCK))
    mantissas, exponents = torch.frexp(blocks.abs().amax(1) / _LARGEST)
    exponents = (exponents - (mantissas == 0.5).int()).clamp_min(_LEAST_EXPONENT)
    scaled = torch.ldexp(blocks, -exponents[:, None])
    if keep_positive:
        scaled = torch.where(blocks > 0, scaled.clamp_min(_SMALLEST), scaled)
    return scaled.to(torch.float8_e4m3fn).reshape(-1), exponents.to(torch.int16)


def unpack(numbers: Tensor, exponents: Tensor, like: Tensor) -> Tensor:
    """Return packed values in the dtype and shape of `like`."""
    blocks = numbers.to(like.dtype).unflatten(0, (-1, SCALE_BLOCK))
    flat = torch.ldexp(blocks, exponents.to(torch.int32)[:, None]).reshape(-1)
    return flat[: like.numel()].reshape(like.shape)


class Muon(Optimizer):
    """Muon: the momentum of a matrix, made orthogonal by Newton and Schulz's iteration (Keller Jordan, 2024).

    For a matrix W with gradient G: B ← μB + (1 − μ)G, U = NS(G + μ(B − G)), W ← (1 − ηλ)W − η·s·U. The
    factor s is that of `muon_adjust_lr`. A tensor of three axes is a stack of matrices, as experts are. Where
    matrices are sharded, each rank gathers the whole of one after the other and keeps its piece of U.
    """

    def __init__(self, pairs: list[tuple[Tensor, nn.Parameter]], config: OptimConfig) -> None:
        super().__init__([master for master, _ in pairs], {"lr": config.lr})
        self.pairs = pairs
        self.config = config

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step on all matrices that have a gradient; where they are sharded, on all ranks."""
        config = self.config
        lr = self.param_groups[0]["lr"]
        for master, parameter in self.pairs:
            if master.grad is None:
                continue
            momentum = read_state(self, master, master.device)["momentum_buffer"]
            momentum.lerp_(master.grad, 1 - config.momentum)
            update = master.grad.lerp(momentum, config.momentum)
            whole = orthogonal(_whole(update, parameter), config.muon_ns_steps)
            piece = whole[own_slices(parameter)].to(master)
            factor = lr_factor(config.muon_adjust_lr, parameter.shape[-2], parameter.shape[-1])
            master.mul_(1 - lr * config.weight_decay)
            master.add_(piece, alpha=-lr * factor)


def _whole(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return the whole of which this rank has the piece that belongs to its part of `parameter`."""
    if not isinstance(parameter, DTensor):
        return piece
    placed = placed_like(piece.to(parameter.device_mesh.device_type), parameter)
    assert isinstance(placed, DTensor)
    whole: Tensor = placed.full_tensor()
    return whole


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Return a nearly orthogonal matrix [..., A, B] with the singular vectors of `matrix`.

    The singular values come close to 1. It is computed in bfloat16 on accelerators, as torch does, and in the
    matrix's own dtype on a CPU.
    """
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrix
    if x.device.type != "cpu":
        x = x.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if tall:
        x = x.mT
    return x


def lr_factor(adjust: Literal["match_rms_adamw", "original"], rows: int, columns: int) -> float:
    """Return the factor of the learning rate of a matrix, with the names of torch.optim.Muon.

    `match_rms_adamw` makes the size of an update that of AdamW (Liu et al., 2502.16982).
    """
    if adjust == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
