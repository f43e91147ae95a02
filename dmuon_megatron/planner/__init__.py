"""Which rank owns which matrix: balanced by the time that batched Newton-Schulz takes.

plan = plan_owners([MatrixTask("layers.0.fc1", 4096, 1024), ...], 8, AnalyticCost("H100"))
plan.owner["layers.0.fc1"], plan.makespan, plan.gap
"""

from dmuon_megatron.planner.owners import PlannerWarning, Policy, plan_owners
from dmuon_megatron.planner.plan import Batch, OwnerPlan
from dmuon_megatron.planner.task import MatrixTask, Worker

__all__ = ["Batch", "MatrixTask", "OwnerPlan", "PlannerWarning", "Policy", "Worker", "plan_owners"]
