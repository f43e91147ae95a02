"""The plain one-process fp32 run that distributed ones are compared with.

Written to be read and believed, not to be fast: no DDP, no buckets, no shards.  Call it inside a
rank of world size 1 (building a Megatron model needs its parallel state).
"""

import math

import torch

from tests.harness.tiny import build_model, forward_loss, microbatches, start_megatron
from tests.harness.types import Reference, Rules, Tiny

MUON = Rules()


def train_reference(
    tiny: Tiny, *, steps: int, rules: Rules = MUON, global_batch_size: int = 12
) -> Reference:
    """Train the tiny model on the whole global batch in one process."""
    start_megatron()
    model = build_model(tiny)
    params = dict(model.named_parameters())
    state = {name: {} for name in params}
    out = Reference()
    for step in range(steps):
        ((tokens, labels),) = microbatches(tiny, step, global_batch_size, 1, rank=0, ranks=1)
        loss = forward_loss(model, tokens, labels).mean()
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        out.losses.append(loss.item())
        with torch.no_grad():
            grads = {
                name: torch.zeros_like(param) if grad is None else grad.clone()
                for (name, param), grad in zip(params.items(), grads, strict=True)
            }
            norm, zeros = clip_(grads, rules.clip)
            for name, param in params.items():
                if rules.muon and is_muon(param):
                    blocks = qkv_blocks(tiny, name, param) if rules.split_qkv else None
                    muon_(param, grads[name], state[name], rules, blocks)
                else:
                    decay = 0.0 if param.ndim == 1 or name.endswith(".bias") else rules.weight_decay
                    adamw_(param, grads[name], state[name], rules, decay)
        out.grad_norms.append(norm)
        out.num_zeros.append(zeros)
        out.snapshots.append({name: param.detach().clone() for name, param in params.items()})
    return out


def is_muon(param: torch.Tensor) -> bool:
    """Megatron's rule: matrices that are neither embedding nor output layer."""
    return param.ndim == 2 and not getattr(param, "is_embedding_or_output_parameter", False)


def clip_(grads: dict[str, torch.Tensor], limit: float) -> tuple[float, int]:
    """Scale all gradients in place; returns the norm before and the number of zeros."""
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads.values()))
    if limit and (factor := limit / (norm + 1e-6)) < 1:
        for grad in grads.values():
            grad.mul_(factor)
    return norm, sum(int((grad == 0).sum()) for grad in grads.values())


def muon_(param, grad, state, rules: Rules, blocks=None) -> None:
    """One Muon step in place.  ``blocks`` has the row numbers of each Newton-Schulz problem."""
    buf = state.setdefault("momentum", torch.zeros_like(param))
    buf.lerp_(grad, 1 - rules.momentum)
    direction = grad.lerp(buf, rules.momentum) if rules.nesterov else buf
    update = torch.empty_like(param)
    for rows in blocks or [torch.arange(param.shape[0])]:
        block = direction[rows]
        update[rows] = (
            newton_schulz(block, rules.coefficients)
            * scale_factor(*block.shape, rules.scale_mode)
            * rules.extra_scale
        )
    param.mul_(1 - rules.lr * rules.weight_decay)
    param.sub_(rules.lr * update)


def newton_schulz(x: torch.Tensor, coefficients) -> torch.Tensor:
    """Nearly the orthogonal factor of a matrix: X <- a X + (b A + c A A) X with A = X X^T."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, coefficients).T
    norm = x.norm()
    x = x / norm if norm > 0 else x
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def scale_factor(rows: int, cols: int, mode: str) -> float:
    """How emerging-optimizers scales the orthogonal factor of a (rows, cols) block."""
    return {
        "spectral": math.sqrt(max(rows, cols)),
        "shape_scaling": math.sqrt(max(1, rows / cols)),
        "unit_rms_norm": math.sqrt(rows / cols),
    }[mode]


def qkv_blocks(tiny: Tiny, name: str, param: torch.Tensor) -> list[torch.Tensor] | None:
    """Rows of all queries, keys and values in a fused QKV weight, None for other weights.

    The rows go by query group: the group's queries, then its key, then its value.
    """
    if not name.endswith("linear_qkv.weight"):
        return None
    head = tiny.hidden // tiny.heads
    queries = tiny.heads // tiny.groups * head
    group = torch.arange(param.shape[0]).view(tiny.groups, queries + 2 * head)
    parts = group.split([queries, head, head], dim=1)
    return [part.flatten() for part in parts]


def adamw_(param, grad, state, rules: Rules, decay: float) -> None:
    """One AdamW step in place."""
    if not state:
        state.update(step=0, m=torch.zeros_like(param), v=torch.zeros_like(param))
    state["step"] += 1
    beta1, beta2 = rules.betas
    state["m"].lerp_(grad, 1 - beta1)
    state["v"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    m = state["m"] / (1 - beta1 ** state["step"])
    v = state["v"] / (1 - beta2 ** state["step"])
    param.mul_(1 - rules.lr * decay)
    param.sub_(rules.lr * m / (v.sqrt() + rules.eps))
