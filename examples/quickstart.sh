#!/usr/bin/env bash
# Trains a small GPT with DMuon and then with AdamW, from nothing: sets up the environment, builds a
# dataset from the Python standard library's sources, pretrains with Megatron's training loop on 4
# ranks (on the CPU over gloo, or on the GPUs there are) and draws both curves into loss.png.
#
#   bash examples/quickstart.sh
#   bash examples/quickstart.sh --steps 40 --nproc 2 --optimizer dmuon
set -u
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

cd "$DMUON_ROOT" || exit 1
# Megatron warns of every optional package that is missing, here where nothing needs one.
exec "$DMUON_PYTHON" -W ignore::UserWarning examples/quickstart.py "$@"
