#!/usr/bin/env bash
# Runs the test suite: sets up the environment, then hands every argument to pytest.
#
#   bash tests/run.sh                      everything
#   bash tests/run.sh -k package -x        as `pytest -k package -x`
set -u
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup.sh"

# One thread a rank: the tests start up to 4 ranks on what may be 2 cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# gloo otherwise resolves the host's name, which fails where it has none.
if [ -e /sys/class/net/lo ]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
fi
# The ranks import torch and Megatron anew in every test; without .pyc files that takes a minute.
unset PYTHONDONTWRITEBYTECODE

cd "$DMUON_ROOT" || exit 1
exec "$DMUON_PYTHON" -m pytest "$@"
