"""HiGHS behind a small interface, with every way it can fail turned into one exception.

HiGHS keeps one task scheduler per thread, sized by the first solve there; a later solve that asks
for another number of threads fails. So the planner's solves all run in a thread of their own: what
the caller did with HiGHS before cannot hurt them, nor they what it does later. The same thread
lets a solver that hangs be given up.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

TOLERANCE = 1e-6
"""How far a value may be from a whole number, a row's or a column's bound."""


class SolverFault(RuntimeError):
    """The solver failed, or gave an answer that is not a solution of its problem."""


@dataclass(frozen=True)
class LinearModel:
    """Minimise `cost` x over x >= 0 with `lower` <= `rows` x.

    Attributes:
        cost: (variables,).
        rows: (rows, variables).
        lower: (rows,) lower bounds of the rows.
        whole: (variables,) which variables must be whole numbers.
    """

    cost: np.ndarray
    rows: np.ndarray
    lower: np.ndarray
    whole: np.ndarray


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Attributes:
        status: "optimal": proven; "stopped": a work limit or the target ended the search.
        values: (variables,), or None if the search stopped without a solution.
        duals: (rows,) of a model without whole variables, else None.
    """

    status: Literal["optimal", "stopped"]
    values: np.ndarray | None
    duals: np.ndarray | None


class Solver(Protocol):
    """Solves a :class:`LinearModel`; raises anything on failure."""

    def solve(
        self, model: LinearModel, *, nodes: int | None = None, target: float | None = None
    ) -> Solution:
        """Solves the model.

        Args:
            nodes: Branch-and-bound nodes after which the search stops.
            target: Objective value that is good enough.
        """
        ...


class HighsSolver:
    """HiGHS with one thread, a fixed seed and work limits instead of clocks: reproducible."""

    def solve(
        self, model: LinearModel, *, nodes: int | None = None, target: float | None = None
    ) -> Solution:
        """Solves the model on a fresh HiGHS object.

        Raises:
            SolverFault: HiGHS refuses the model, or ends in a state other than solved or stopped.
        """
        import highspy

        highs = _quiet_highs()
        options = {"threads": 1, "parallel": "off", "random_seed": 0, "mip_rel_gap": 1e-9}
        if nodes is not None:
            options["mip_max_nodes"] = nodes
        if target is not None:
            options["objective_target"] = target
        for name, value in options.items():
            if highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
                raise SolverFault(f"HiGHS refused the option {name}={value}")

        rows, variables = model.rows.shape
        lp = highspy.HighsLp()
        lp.num_row_, lp.num_col_ = rows, variables
        lp.col_cost_ = model.cost
        lp.col_lower_ = np.zeros(variables)
        lp.col_upper_ = np.full(variables, highspy.kHighsInf)
        lp.row_lower_ = model.lower
        lp.row_upper_ = np.full(rows, highspy.kHighsInf)
        by_column = model.rows.T
        where = by_column != 0
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.concatenate(([0], where.sum(axis=1).cumsum())).astype(np.int32)
        lp.a_matrix_.index_ = np.nonzero(where)[1].astype(np.int32)
        lp.a_matrix_.value_ = by_column[where]
        if model.whole.any():
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            lp.integrality_ = [kinds[int(whole)] for whole in model.whole]
        if highs.passModel(lp) == highspy.HighsStatus.kError:
            raise SolverFault("HiGHS refused the model")
        highs.run()

        ended = highs.getModelStatus()
        states = highspy.HighsModelStatus
        if ended == states.kOptimal:
            status = "optimal"
        elif ended in (states.kSolutionLimit, states.kObjectiveTarget, states.kObjectiveBound):
            status = "stopped"
        else:
            raise SolverFault(f"HiGHS ended with status {highs.modelStatusToString(ended)!r}")
        found = (
            highs.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        )
        solution = highs.getSolution()
        return Solution(
            status,
            np.array(solution.col_value) if found else None,
            None if model.whole.any() else np.array(solution.row_dual),
        )


def _quiet_highs():
    """A HiGHS object that writes nothing.

    Its constructor sets up callbacks, which prints a banner to standard output, in the middle of
    whatever the program prints there. The planner needs no callbacks.
    """
    import highspy

    class QuietHighs(highspy.Highs):
        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)

    highs = QuietHighs()
    highs.silent()
    return highs


def checked(solver: Solver, model: LinearModel, **limits) -> Solution:
    """Solves and verifies the answer.

    Raises:
        SolverFault: The solver raised, a linear program came back without solution, or values are
            not finite, violate a row, or are fractional where they must be whole.
    """
    try:
        solution = solver.solve(model, **limits)
    except SolverFault:
        raise
    except Exception as error:
        raise SolverFault(f"the solver raised {type(error).__name__}: {error}") from error
    linear = not model.whole.any()
    if solution.values is None:
        if linear or solution.status == "optimal":
            raise SolverFault("the solver gave no solution to a feasible problem")
        return solution
    values = np.asarray(solution.values, dtype=np.float64)
    if values.shape != model.cost.shape or not np.isfinite(values).all():
        raise SolverFault("the solver's values are not finite numbers, one for each variable")
    if values.min(initial=0.0) < -TOLERANCE:
        raise SolverFault("the solver's values are negative")
    whole = values[model.whole]
    if np.abs(whole - whole.round()).max(initial=0.0) > TOLERANCE:
        raise SolverFault("the solver's values are fractional where they must be whole")
    scale = np.maximum(1.0, np.abs(model.lower))
    if ((model.rows @ values - model.lower) / scale).min(initial=0.0) < -TOLERANCE:
        raise SolverFault("the solver's values violate a constraint")
    if linear:
        duals = solution.duals
        if duals is None or np.shape(duals) != model.lower.shape or not np.isfinite(duals).all():
            raise SolverFault("the solver gave no dual values")
    return solution


def run_apart[T](function: Callable[[], T], seconds: float) -> T:
    """Runs a function in a thread of its own.

    Raises:
        SolverFault: It did not return within `seconds`; its thread is left behind.
        Exception: Whatever the function raised.
    """
    outcome: dict[str, object] = {}

    def target() -> None:
        try:
            outcome["value"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=target, name="dmuon-planner", daemon=True)
    thread.start()
    thread.join(min(seconds, threading.TIMEOUT_MAX))
    if thread.is_alive():
        raise SolverFault(f"the solver did not answer within {seconds:g} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
