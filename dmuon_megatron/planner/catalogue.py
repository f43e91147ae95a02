"""Shapes of well-known models, as Megatron stores them: QKV fused, gate and up fused.

Shapes are rows x cols = output x input features, from the models' published configurations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dmuon_megatron.planner.task import MatrixTask

Sharding = Literal["rows", "cols", "none"]


@dataclass(frozen=True)
class Weight:
    """One weight of a layer.

    Attributes:
        name: Name inside the layer.
        parts: Rows of each Newton-Schulz block; they add up to the weight's rows.
        cols: Columns.
        sharding: Dimension that tensor parallelism splits; "none": replicated.
    """

    name: str
    parts: tuple[int, ...]
    cols: int
    sharding: Sharding = "none"

    def task(self, prefix: str, bucket: int, tp: int, split: bool, gate_up: bool) -> MatrixTask:
        """The weight, or one tensor-parallel shard of it, as a task.

        Args:
            split: Make its parts blocks of their own, but for gate and up.
            gate_up: Those too.

        Raises:
            ValueError: Its sharded dimension is not divisible by `tp`.
        """
        parts, cols = self.parts, self.cols
        if self.sharding == "rows":
            parts = tuple(self._shard(part, tp) for part in parts)
        elif self.sharding == "cols":
            cols = self._shard(cols, tp)
        rows = sum(parts)
        apart = split and (gate_up or self.name != "fc1")
        blocks = tuple((part, cols) for part in parts) if apart else None
        return MatrixTask(f"{prefix}.{self.name}", rows, cols, bucket, blocks)

    def _shard(self, size: int, tp: int) -> int:
        if size % tp:
            raise ValueError(f"{self.name}: {size} features cannot be split over tp={tp} ranks")
        return size // tp


@dataclass(frozen=True)
class Layer:
    """Weights of one layer.

    Attributes:
        prefix: Name in front of the weights' names.
        weights: Weights outside the experts, in forward order.
        expert: Weights of one expert.
        experts: Number of experts of the whole model.
    """

    prefix: str
    weights: tuple[Weight, ...]
    expert: tuple[Weight, ...] = ()
    experts: int = 0


@dataclass(frozen=True)
class Model:
    """A model of the catalogue: its layers in forward order."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(layer.experts for layer in self.layers)

    def stage(self, pp: int, index: int) -> "Model":
        """The layers of one of `pp` pipeline stages, as even as possible, earlier ones larger.

        Raises:
            ValueError: There are more stages than layers.
        """
        if not 1 <= pp <= len(self.layers):
            raise ValueError(f"pp must be between 1 and the {len(self.layers)} layers, got {pp}")
        size, larger = divmod(len(self.layers), pp)
        first = index * size + min(index, larger)
        return Model(self.name, self.layers[first : first + size + (index < larger)])

    def dense_tasks(
        self, *, tp: int = 1, split: bool = True, gate_up: bool = True
    ) -> list[MatrixTask]:
        """Every matrix outside the experts, one bucket a layer.

        Args:
            tp: Tensor-parallel size; the tasks are the shards of one rank.
            split: Orthogonalize Q, K, V and gate, up apart; else each fused weight as a whole.
            gate_up: Whether `split` means gate and up, too.
        """
        return [
            weight.task(layer.prefix, bucket, tp, split, gate_up)
            for bucket, layer in enumerate(self.layers)
            for weight in layer.weights
        ]

    def expert_tasks(
        self, *, ep: int = 1, split: bool = True, gate_up: bool = True
    ) -> list[MatrixTask]:
        """Matrices of the experts of one of `ep` expert-parallel ranks.

        Raises:
            ValueError: The experts cannot be divided by `ep`.
        """
        tasks = []
        for bucket, layer in enumerate(self.layers):
            if layer.experts % ep:
                raise ValueError(f"{self.name}: {layer.experts} experts do not divide by ep={ep}")
            for expert in range(layer.experts // ep):
                prefix = f"{layer.prefix}.experts.{expert}"
                tasks += [weight.task(prefix, bucket, 1, split, gate_up) for weight in layer.expert]
        return tasks


def find_model(name: str) -> Model:
    """The catalogue's model of that name, upper and lower case alike.

    Raises:
        ValueError: It is not in the catalogue; the message lists what is.
    """
    for known in CATALOGUE:
        if known.lower() == name.lower():
            return CATALOGUE[known]
    raise ValueError(f"model {name!r} is not in the catalogue: {', '.join(CATALOGUE)}")


def _transformer(
    prefix: str, layers: int, hidden: int, heads: int, groups: int, ffn: int, *, gated: bool = True
) -> list[Layer]:
    """Layers of fused QKV (parts q, k, v), output projection and MLP; `heads`, `groups` in rows."""
    parts = (heads, groups, groups)
    weights = (
        Weight("qkv", parts, hidden, "rows"),
        Weight("proj", (hidden,), heads, "cols"),
        Weight("fc1", (ffn, ffn) if gated else (ffn,), hidden, "rows"),
        Weight("fc2", (hidden,), ffn, "cols"),
    )
    return [Layer(f"{prefix}.{i}", weights) for i in range(layers)]


def _pi0() -> list[Layer]:
    """Pi0: vision tower, projector, then language model and action expert layer by layer."""
    vision = _transformer("vision.layers", 27, 1152, 1152, 1152, 4304, gated=False)
    projector = Layer("projector", (Weight("weight", (2048,), 1152),))
    language = _transformer("language.layers", 18, 2048, 2048, 256, 16384)
    action = _transformer("action.layers", 18, 1024, 2048, 256, 4096)
    heads = Layer(
        "action",
        (
            Weight("state_in", (1024,), 32),
            Weight("action_in", (1024,), 32),
            Weight("time_in", (1024,), 2048),
            Weight("time_out", (1024,), 1024),
            Weight("action_out", (32,), 1024),
        ),
    )
    pairs = [layer for pair in zip(language, action, strict=True) for layer in pair]
    return [*vision, projector, *pairs, heads]


def _qwen3_moe() -> list[Layer]:
    weights = (
        Weight("qkv", (4096, 512, 512), 2048, "rows"),
        Weight("proj", (2048,), 4096, "cols"),
        Weight("router", (128,), 2048),
    )
    expert = (Weight("fc1", (768, 768), 2048, "rows"), Weight("fc2", (2048,), 768, "cols"))
    return [Layer(f"layers.{i}", weights, expert, 128) for i in range(48)]


def _deepseek_v3() -> list[Layer]:
    attention = (
        Weight("q_down", (1536,), 7168),
        Weight("q_up", (24576,), 1536, "rows"),
        Weight("kv_down", (576,), 7168),
        Weight("kv_up", (32768,), 512, "rows"),
        Weight("proj", (7168,), 16384, "cols"),
    )
    dense = (Weight("fc1", (18432, 18432), 7168, "rows"), Weight("fc2", (7168,), 18432, "cols"))
    expert = (Weight("fc1", (2048, 2048), 7168, "rows"), Weight("fc2", (7168,), 2048, "cols"))
    shared = tuple(Weight(f"shared.{w.name}", w.parts, w.cols, w.sharding) for w in expert)
    router = Weight("router", (256,), 7168)
    layers = [Layer(f"layers.{i}", (*attention, *dense)) for i in range(3)]
    sparse = (*attention, router, *shared)
    return layers + [Layer(f"layers.{i}", sparse, expert, 256) for i in range(3, 61)]


CATALOGUE = {
    name: Model(name, tuple(layers))
    for name, layers in {
        "Qwen2.5-7B": _transformer("layers", 28, 3584, 3584, 512, 18944),
        "Llama-3-8B": _transformer("layers", 32, 4096, 4096, 1024, 14336),
        "Llama-3-70B": _transformer("layers", 80, 8192, 8192, 1024, 28672),
        "GPT-3-175B": _transformer("layers", 96, 12288, 12288, 12288, 49152, gated=False),
        "Pi0-3B": _pi0(),
        "Qwen3-30B-A3B": _qwen3_moe(),
        "DeepSeek-V3": _deepseek_v3(),
    }.items()
}
"""Models by name."""


def bucketed(tasks: Sequence[MatrixTask], bucket_elements: int) -> list[MatrixTask]:
    """Tasks in forward order regrouped into buckets as Megatron fills them, from the last layer on.

    A bucket is closed once it holds `bucket_elements`.
    """
    numbers = []
    bucket, held = 0, 0
    for task in reversed(tasks):
        numbers.append(bucket)
        held += task.numel
        if held >= bucket_elements:
            bucket, held = bucket + 1, 0
    last = numbers[-1] if numbers else 0
    return [
        MatrixTask(task.name, task.rows, task.cols, last - number, task.blocks)
        for task, number in zip(tasks, reversed(numbers), strict=True)
    ]
