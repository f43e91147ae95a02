"""What a user can choose beyond Megatron's own ``--muon-*`` flags, and what is refused."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

NSMethod = Literal["auto", "gram", "standard"]
OwnerPolicy = Literal["milp", "lpt", "numel", "round-robin"]


@dataclass(frozen=True)
class DMuonConfig:
    """Settings of DMuon that change its speed and memory, never the mathematics of the update.

    Attributes:
        workspace_mb: most memory, in MiB, that one batch of Newton-Schulz problems may use for its
            stack and intermediates. A single problem that needs more still runs, alone.
        ns_method: ``auto`` takes the Gram form where it needs fewer FLOPs, else the standard form.
        owner_policy: how matrices are assigned to data-parallel ranks, see ``plan_owners``:
            ``milp`` and ``lpt`` balance the time of batched Newton-Schulz, exactly and greedily;
            ``numel`` balances sizes; ``round-robin`` deals in forward order.
        plan_budget: seconds that ``milp`` may search for better than its greedy start.
        profile_budget: seconds for timing Newton-Schulz on the device before planning, once per
            device and shape, since results are kept on disk; 0: a model of the device instead.
        waves: in how many parts the matrices are updated and published. While a part is on its way
            to the other ranks the next is computed.
        split_qkv: orthogonalize the Q, K and V rows of a fused QKV weight separately
            (``--muon-no-split-qkv`` turns it off).
        bucket_size: elements per communication bucket (``--ddp-bucket-size``); None: Megatron's
            default, max(40e6, 1e6 x data-parallel size).
        num_buckets: instead of bucket_size, how many buckets to aim at (``--ddp-num-buckets``).
        ns_steps, matmul_precision: what is timed (``--muon-num-ns-steps``,
            ``--muon-fp32-matmul-prec``).

    Raises:
        ValueError: a value that is out of range, naming its flag.
    """

    workspace_mb: int = 1024
    ns_method: NSMethod = "auto"
    owner_policy: OwnerPolicy = "milp"
    plan_budget: float = 20.0
    profile_budget: float = 20.0
    waves: int = 4
    split_qkv: bool = True
    bucket_size: int | None = None
    num_buckets: int | None = None
    ns_steps: int = 5
    matmul_precision: str = "medium"

    def __post_init__(self):
        if not _is_count(self.workspace_mb):
            raise ValueError(
                f"--dmuon-workspace-mb must be a whole number of MiB, at least 1, got "
                f"{self.workspace_mb!r}"
            )
        if not 0 < self.plan_budget < float("inf"):
            raise ValueError(
                f"--dmuon-plan-budget must be a number of seconds above 0, got {self.plan_budget}"
            )
        if not 0 <= self.profile_budget < float("inf"):
            raise ValueError(
                "--dmuon-profile-budget must be a number of seconds, 0 for none, got "
                f"{self.profile_budget}"
            )
        for flag, value, choices in (
            ("--dmuon-ns-method", self.ns_method, get_args(NSMethod)),
            ("--dmuon-owner-policy", self.owner_policy, get_args(OwnerPolicy)),
        ):
            if value not in choices:
                raise ValueError(f"{flag} must be one of {', '.join(choices)}, got {value!r}")
        for flag, value in (
            ("--dmuon-waves", self.waves),
            ("--ddp-bucket-size", self.bucket_size),
            ("--ddp-num-buckets", self.num_buckets),
            ("--muon-num-ns-steps", self.ns_steps),
        ):
            if not (_is_count(value) or (value is None and flag.startswith("--ddp"))):
                raise ValueError(f"{flag} must be a whole number, at least 1, got {value!r}")

    @classmethod
    def from_args(cls, args: Any) -> "DMuonConfig":
        """The configuration in Megatron's parsed arguments.

        Args:
            args: namespace with ``dmuon_*``, ``muon_*`` and ``ddp_*``; what is absent keeps its
                default.
        """
        source = {
            "split_qkv": "muon_split_qkv",
            "ns_steps": "muon_num_ns_steps",
            "matmul_precision": "muon_fp32_matmul_prec",
            "bucket_size": "ddp_bucket_size",
            "num_buckets": "ddp_num_buckets",
        }
        values = {}
        for f in fields(cls):
            name = source.get(f.name, f"dmuon_{f.name}")
            if hasattr(args, name):
                values[f.name] = getattr(args, name)
        return cls(**values)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


@dataclass(frozen=True)
class Refusal:
    """One setting of Megatron's that DMuon does not serve yet.

    Attributes:
        flag: what the user typed.
        fields: names of the setting in Megatron's arguments and config objects.
        limit: numbers up to this are served; None: any true value is refused.
        value: refuse this value only.
        hint: what to do instead.
    """

    flag: str
    fields: tuple[str, ...]
    limit: int | None = None
    value: str | None = None
    hint: str = "leave it out, or use --optimizer muon"

    def hits(self, setting: Any) -> bool:
        if setting is None:
            return False
        if self.limit is not None:
            return setting > self.limit
        if self.value is not None:
            return setting == self.value
        return bool(setting)


_PARALLEL = "DMuon runs on the data-parallel group only so far"
REFUSED = (
    Refusal("--tensor-model-parallel-size", ("tensor_model_parallel_size",), 1, hint=_PARALLEL),
    Refusal("--pipeline-model-parallel-size", ("pipeline_model_parallel_size",), 1, hint=_PARALLEL),
    Refusal(
        "--num-virtual-stages-per-pipeline-rank",
        ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"),
        1,
        hint=_PARALLEL,
    ),
    Refusal("--context-parallel-size", ("context_parallel_size",), 1, hint=_PARALLEL),
    Refusal("--expert-model-parallel-size", ("expert_model_parallel_size",), 1, hint=_PARALLEL),
    Refusal("--expert-tensor-parallel-size", ("expert_tensor_parallel_size",), 1, hint=_PARALLEL),
    # More weight shards than tensor-parallel ranks: Megatron's generalized tensor parallelism.
    Refusal(
        "--tensor-parallel-num-weight-shards",
        ("tensor_parallel_num_weight_shards", "gtp_weight_remat_size"),
        1,
        hint=_PARALLEL,
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards",
        ("expert_tensor_parallel_num_weight_shards", "expert_gtp_weight_remat_size"),
        1,
        hint=_PARALLEL,
    ),
    Refusal(
        "--num-distributed-optimizer-instances",
        ("num_distributed_optimizer_instances",),
        1,
        hint="use 1",
    ),
    Refusal(
        "--overlap-param-gather-with-optimizer-step", ("overlap_param_gather_with_optimizer_step",)
    ),
    Refusal("--fp16", ("fp16",), hint="use --bf16, or train in fp32"),
    Refusal("--use-precision-aware-optimizer", ("use_precision_aware_optimizer",)),
    Refusal("--optimizer-cpu-offload", ("optimizer_cpu_offload",)),
    Refusal("--optimizer-cuda-graph", ("optimizer_cuda_graph",)),
    Refusal("--cuda-graph-impl full_iteration", ("cuda_graph_impl",), value="full_iteration"),
    Refusal("--fp8-param-gather", ("fp8_param_gather",)),
    Refusal("--fp4-param-gather", ("fp4_param_gather",)),
    Refusal("--reuse-grad-buf-for-mxfp8-param-ag", ("reuse_grad_buf_for_mxfp8_param_ag",)),
    Refusal(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        ("ddp_reduce_scatter_with_fp32_accumulation", "reduce_scatter_with_fp32_accumulation"),
    ),
    Refusal("--use-nccl-ub", ("nccl_ub",)),
    Refusal("--use-megatron-fsdp", ("use_megatron_fsdp",)),
    Refusal("--use-torch-fsdp2", ("use_torch_fsdp2",)),
    Refusal("--muon-scalar-optimizer lion", ("muon_scalar_optimizer",), value="lion"),
    Refusal("--muon-fp32-matmul-prec low", ("muon_fp32_matmul_prec",), value="low"),
    Refusal("--qk-clip", ("qk_clip",)),
)


def refuse_unsupported(*settings: Any) -> None:
    """Raise if Megatron is set up in a way that DMuon does not serve.

    Args:
        settings: Megatron's arguments, or its transformer, DDP and optimizer configs.

    Raises:
        ValueError: names every flag that stands in the way and what to do about it.
    """
    found = []
    for refusal in REFUSED:
        values = (getattr(s, f, None) for s in settings for f in refusal.fields)
        hit = next((v for v in values if refusal.hits(v)), None)
        if hit is not None:
            shown = "" if hit is True or refusal.value else f" {hit}"
            found.append(f"{refusal.flag}{shown}: not supported by DMuon; {refusal.hint}")
    if found:
        raise ValueError(
            "--optimizer dmuon cannot run with these settings:\n  " + "\n  ".join(found)
        )
