"""Pretrains one small GPT with several optimizers and compares them; see quickstart.sh.

Everything is done by Megatron itself through pretrain_gpt.py. The losses and times are read from
the TensorBoard files that Megatron writes, the rest of its output goes to a log file.
"""

import argparse
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from build_dataset import DEFAULT_BYTES, VOCAB_SIZE, build
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "quickstart-run"
PICTURE = ROOT / "loss.png"

SAMPLES_PER_STEP = 16
EVAL_ITERS = 8
# Step 1 pays for first touches, and Megatron's timers of step 2 still hold those of step 1.
FIRST_TIMED_STEP = 3

MODEL = """
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 768 --swiglu --disable-bias-linear
    --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
    --seq-length 256 --max-position-embeddings 256 --hidden-dropout 0 --attention-dropout 0 --bf16
"""
SCHEDULE = """
    --lr-decay-style cosine --min-lr 0 --lr-warmup-fraction 0.1
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
"""
# Layers and losses in plain torch, so that neither Transformer Engine nor Apex is needed.
PLAIN_TORCH = """
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-rope-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
"""
LOGGING = """
    --log-interval 1 --tensorboard-log-interval 1 --tensorboard-queue-size 1
    --timing-log-level 1 --log-timers-to-tensorboard --eval-interval 1000000
"""
# Learning rates: powers of two times 1e-3 were tried until both neighbours of the best were worse,
# alike for both optimizers, by validation loss after 100 steps (one rank, Megatron's own Muon):
#           5e-4   1e-3   2e-3   4e-3   8e-3   1.6e-2
#   AdamW  2.247  2.185  2.255  2.560  2.672
#   Muon          2.207  2.117  2.036  1.935  1.972
# Muon's extra factor of 0.2 gives its updates about the size of AdamW's (arXiv 2502.16982), so that
# one rate serves the matrices and the parameters that stay with Adam.
MUON = "--lr 8e-3 --muon-momentum 0.95 --muon-extra-scale-factor 0.2"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce"
OPTIMIZERS = {
    "dmuon": f"--optimizer dmuon {MUON} {DISTRIBUTED} --overlap-param-gather",
    "adam": f"--optimizer adam --lr 1e-3 {DISTRIBUTED} --overlap-param-gather",
    # Megatron's own, which refuses --overlap-param-gather
    "muon": f"--optimizer muon {MUON} {DISTRIBUTED}",
}

console = Console()


@dataclass(frozen=True)
class Run:
    """What one training run left in its TensorBoard files.

    Attributes:
        losses: training loss of each step, the first step's first.
        validation: loss on held-out text after the last step.
        step_seconds: median time of a step; NaN for runs too short to time.
        optimizer_share: part of that time that Megatron's `optimizer` timer saw on the slowest
            rank. What overlaps with the forward or backward pass is not in it.
    """

    losses: list[float]
    validation: float
    step_seconds: float
    optimizer_share: float


def command(optimizer: str, steps: int, nproc: int, data: Path, tensorboard: Path) -> list[str]:
    """The command line that trains."""
    micro_batch = max(1, SAMPLES_PER_STEP // nproc)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    run = f"""
        --train-iters {steps} --micro-batch-size {micro_batch}
        --global-batch-size {micro_batch * nproc} --eval-iters {EVAL_ITERS} --num-workers 0
        --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --split 99,1,0
        --distributed-backend {backend}
    """
    paths = {
        "--data-path": data,
        "--data-cache-path": data.parent / "index",
        "--tensorboard-dir": tensorboard,
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [
        *(sys.executable, *launcher, str(ROOT / "examples" / "pretrain_gpt.py")),
        *"".join((OPTIMIZERS[optimizer], MODEL, SCHEDULE, PLAIN_TORCH, LOGGING, run)).split(),
        *(str(word) for item in paths.items() for word in item),
    ]


def is_plan(line: str) -> bool:
    """Whether a line of output is DMuon's own: the table of owners and what goes with it."""
    return line.startswith("DMuon") or bool(re.match("[\u2500-\u257f]", line))


def train(optimizer: str, steps: int, nproc: int, data: Path) -> Run:
    """Trains to the end, showing the owner plan and progress.

    Raises:
        RuntimeError: the training failed; the message holds the end of its output.
    """
    folder = FOLDER / optimizer
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    console.print(f"\n[bold]{optimizer}[/bold]: {steps} steps on {nproc} ranks, log in {log}")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    step_line = re.compile(r"iteration +(\d+)/.*lm loss: (\S+)")
    with (
        log.open("w") as file,
        Progress(*columns, console=console) as progress,
        subprocess.Popen(
            command(optimizer, steps, nproc, data, folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
        ) as process,
    ):
        bar = progress.add_task("starting Megatron", total=steps)
        try:
            for line in process.stdout:
                file.write(line)
                if is_plan(line):
                    console.print(line.rstrip("\n"), markup=False, highlight=False)
                elif match := step_line.search(line):
                    step, loss = int(match[1]), float(match[2])
                    progress.update(bar, completed=step, description=f"loss {loss:.3f}")
                    if not console.is_terminal and step % max(1, steps // 5) == 0:
                        console.print(f"step {step}: loss {loss:.3f}")
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        end = "".join(log.read_text().splitlines(keepends=True)[-40:])
        raise RuntimeError(f"{end}\ntraining with {optimizer} failed, see {log}")
    return read_run(folder)


def read_run(folder: Path) -> Run:
    """Reads what Megatron wrote with the flags of LOGGING.

    Raises:
        KeyError: the run logged no loss.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()

    def scalars(tag: str) -> list[float]:
        return [event.value for event in events.Scalars(tag)]

    def timed(tag: str) -> list[float]:
        if tag not in events.Tags()["scalars"]:
            return []
        return [event.value for event in events.Scalars(tag) if event.step >= FIRST_TIMED_STEP]

    seconds, in_optimizer = timed("iteration-time"), timed("optimizer-time")
    return Run(
        losses=scalars("lm loss"),
        validation=scalars("lm loss validation")[-1],
        step_seconds=statistics.median(seconds) if seconds else float("nan"),
        optimizer_share=sum(in_optimizer) / sum(seconds) if seconds else float("nan"),
    )


def loss_table(runs: dict[str, Run], steps: int, rows: int = 10) -> Table:
    """The training losses side by side, each the mean over the steps since the row before."""
    table = Table(title="Training loss", title_justify="left")
    table.add_column("steps", justify="right")
    for name in runs:
        table.add_column(name, justify="right")
    ends = sorted({round(steps * row / rows) for row in range(1, rows + 1)} - {0})
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        means = (statistics.fmean(run.losses[begin:end]) for run in runs.values())
        label = str(end) if end - begin == 1 else f"{begin + 1}-{end}"
        table.add_row(label, *(f"{mean:.3f}" for mean in means))
    return table


def summary_table(runs: dict[str, Run]) -> Table:
    """Validation loss and times of each run."""
    table = Table(title="Summary", title_justify="left")
    table.add_column("optimizer")
    for heading in ("learning rate", "validation loss", "ms a step", "optimizer's share"):
        table.add_column(heading, justify="right")
    for name, run in runs.items():
        flags = OPTIMIZERS[name].split()
        table.add_row(
            name,
            flags[flags.index("--lr") + 1],
            f"{run.validation:.3f}",
            *(
                ["-", "-"]
                if math.isnan(run.step_seconds)
                else [f"{1e3 * run.step_seconds:.0f}", f"{run.optimizer_share:.1%}"]
            ),
        )
    return table


def draw(runs: dict[str, Run], picture: Path) -> None:
    """Draws the loss of every step, faint, and its mean over the last steps."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, run in runs.items():
        steps = range(1, len(run.losses) + 1)
        window = max(1, len(run.losses) // 20)
        smooth = [statistics.fmean(run.losses[max(0, step - window) : step]) for step in steps]
        label = f"{name} (validation {run.validation:.3f})"
        (line,) = axes.plot(steps, smooth, ".-" if len(steps) < 5 else "-", label=label)
        axes.plot(steps, run.losses, color=line.get_color(), alpha=0.25)
    axes.set(
        title="A 4-layer GPT on the Python standard library's sources",
        xlabel="step (faint: each step; bold: mean of the last ones)",
        ylabel="training loss, nats a byte",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument(
        "--nproc", type=int, default=gpus or 4, help="ranks; default: every GPU, or 4 on the CPU"
    )
    parser.add_argument(
        "--optimizer",
        action="append",
        choices=[*OPTIMIZERS],
        help="may be given several times; default: dmuon, then adam (AdamW). "
        "muon is Megatron's own",
    )
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    if args.nproc < 1:
        parser.error(f"--nproc must be at least 1, got {args.nproc}")
    if 0 < gpus < args.nproc:
        parser.error(f"--nproc {args.nproc} needs as many GPUs, {gpus} are there")
    args.optimizer = list(dict.fromkeys(args.optimizer or ("dmuon", "adam")))
    return args


def compare(optimizers: list[str], steps: int, nproc: int) -> None:
    """Builds the dataset where there is none, trains with each optimizer, prints and draws.

    Raises:
        RuntimeError: a training failed; the message holds the end of its output.
    """
    began = time.monotonic()
    version = ".".join(map(str, sys.version_info[:3]))
    data = FOLDER / "data" / f"stdlib-{version}-{DEFAULT_BYTES}"
    if not data.with_name(data.name + ".idx").exists():
        console.print("building the dataset from the standard library's sources ...")
        documents, tokens = build(data)
        console.print(f"{documents} files, {tokens:,} bytes, one token each")

    runs = {name: train(name, steps, nproc, data) for name in optimizers}

    console.print()
    console.print(loss_table(runs, steps))
    console.print(summary_table(runs))
    console.print(
        "The share is Megatron's `optimizer` timer on the slowest rank; "
        "communication hidden behind forward and backward is not in it."
    )
    draw(runs, PICTURE)
    console.print(f"curves in {PICTURE}; without set-up it took {time.monotonic() - began:.0f} s")


def main() -> None:
    args = parse_arguments()
    FOLDER.mkdir(exist_ok=True)
    try:
        with FileLock(FOLDER / "lock", timeout=0):
            compare(args.optimizer, args.steps, args.nproc)
    except Timeout:
        sys.exit(f"another quick start is writing to {FOLDER}; wait until it has ended")
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
