"""What tests hand to ranks and get back: importable without Megatron, as the test process is."""

from dataclasses import dataclass, field

import torch

# The "quintic" set of emerging-optimizers 0.3, from modded-nanogpt's train_gpt_medium.py.
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


@dataclass(frozen=True)
class Tiny:
    """What the model and its data look like; the defaults are a Llama in small.

    Attributes:
        layers, hidden, heads, groups, ffn, vocab: sizes; ``groups`` counts query groups, and
            ``ffn`` is the width after the gate (linear_fc1 has twice as many rows).
        sequence: tokens in a sample.
        norm: "RMSNorm" or "LayerNorm".
        tied: the output layer shares the embedding's weight.
        bias: linear layers and norms have biases (norms have one with LayerNorm anyway).
        experts: number of experts in each layer, 0 for a dense model.
        top_k: experts each token goes to.
        shared_expert: whether a layer has a shared expert too.
        bf16: parameters in bfloat16.
        seed: of the initial weights.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    groups: int = 2
    ffn: int = 96
    vocab: int = 128
    sequence: int = 16
    norm: str = "RMSNorm"
    tied: bool = False
    bias: bool = False
    experts: int = 0
    top_k: int = 2
    shared_expert: bool = False
    bf16: bool = False
    seed: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32


@dataclass(frozen=True)
class Rules:
    """The update.  Names and defaults follow ``loop.optimizer_config``.

    Attributes:
        muon: False trains everything with AdamW.
        lr, weight_decay: of all parameters; decay is off for vectors and biases.
        momentum, nesterov, coefficients, scale_mode, extra_scale, split_qkv: Muon's.
        betas, eps: AdamW's.
        clip: largest global gradient norm, 0 for no clipping.
    """

    muon: bool = True
    lr: float = 1e-2
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = False
    coefficients: tuple = QUINTIC
    scale_mode: str = "spectral"
    extra_scale: float = 1.0
    split_qkv: bool = True
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-6
    clip: float = 1.0


@dataclass
class Reference:
    """What the reference run leaves behind, as in ``Run``; ``snapshots`` has all steps."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_zeros: list[int] = field(default_factory=list)
    snapshots: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.snapshots[-1]


@dataclass
class Run:
    """What a run leaves behind; everything is this rank's own view.

    Attributes:
        losses: mean loss over the global batch at each step, before its update.
        eval_losses: losses of the evaluations, in order.
        grad_norms: global norms before clipping.
        num_zeros: zeros among all gradients, at each step.
        weights: full weights by name at the end, on the CPU in the model's dtype.
        snapshots: the same after each step, if asked for.
        model, optimizer: for looking at inside the rank; dropped by ``portable()``.
    """

    losses: list[float] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_zeros: list[int] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    snapshots: list[dict[str, torch.Tensor]] = field(default_factory=list)
    model: torch.nn.Module | None = None
    optimizer: object | None = None

    def portable(self) -> "Run":
        """This run without what cannot leave the rank."""
        self.model = self.optimizer = None
        return self
