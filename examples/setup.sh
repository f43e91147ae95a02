# shellcheck shell=bash
# Sets up the project's virtual environment; sourced by examples/quickstart.sh and tests/run.sh.
#
#   PYTHON      the interpreter to use (3.12 or newer); looked for when unset
#   DMUON_VENV  where the environment lives, .venv in the repository when unset
#
# Leaves DMUON_ROOT (the repository) and DMUON_PYTHON (the environment's interpreter) set, and what
# several ranks on one machine need in the process environment.
# Safe to run again: a finished set-up is recognised by a stamp and costs nothing, one that was
# interrupted is made anew, and of two at once the second waits for the first. An environment that
# somebody else made (say with --system-site-packages, to use a container's own PyTorch) is filled
# up and never wiped.

DMUON_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

dmuon_say() { printf '[set-up] %s\n' "$*" >&2; }
dmuon_fail() { printf '[set-up] error: %s\n' "$*" >&2; exit 1; }

# Does $1 start, and is it new enough? (pyenv's shims named python3.12 exist and fail.)
dmuon_python_works() {
    "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 12))' </dev/null >/dev/null 2>&1
}

dmuon_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' </dev/null; }

# Prints the interpreter to build the environment with.
dmuon_find_python() {
    local candidate minor
    if [ -n "${PYTHON:-}" ]; then
        dmuon_python_works "$PYTHON" ||
            dmuon_fail "PYTHON=$PYTHON does not start or is older than Python 3.12"
        command -v "$PYTHON"
        return
    fi
    for minor in {12..30} ''; do
        candidate=$(command -v "python3${minor:+.$minor}") || continue
        if dmuon_python_works "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    for minor in {12..30}; do
        for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor"*/bin/python; do
            if dmuon_python_works "$candidate"; then
                printf '%s\n' "$candidate"
                return
            fi
        done
    done
    dmuon_fail "Python 3.12 or newer was not found on PATH or among pyenv's versions;" \
        "install it or set PYTHON to one"
}

dmuon_check_compiler() {
    local candidate
    for candidate in ${CXX:+"${CXX%% *}"} c++ g++ clang++; do
        command -v "$candidate" >/dev/null && return
    done
    dmuon_fail "no C++ compiler was found; install g++ or clang, or set CXX to one"
}

# Fills $1, the environment, for the checkout $DMUON_ROOT. Called with the lock held.
dmuon_install() {
    local venv=$1 python
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
    local stamp="$venv/dmuon-stamp" unfinished="$venv/dmuon-unfinished" ours="$venv/dmuon-ours"
    local sources
    sources=$(cat "$DMUON_ROOT/pyproject.toml" "$DMUON_ROOT/examples/setup.sh" | cksum)

    if [ -n "${PYTHON:-}" ] && [ -e "$stamp" ]; then
        python=$(dmuon_find_python) || exit 1
        [ "$(dmuon_version "$python")" = "$(dmuon_version "$venv/bin/python")" ] ||
            dmuon_fail "$venv was made with Python $(dmuon_version "$venv/bin/python"), PYTHON=$PYTHON" \
                "is $(dmuon_version "$python"): remove it, or set DMUON_VENV to another folder"
    fi

    if [ ! -e "$venv/pyvenv.cfg" ] || { [ -e "$ours" ] && [ -e "$unfinished" ]; } ||
        ! dmuon_python_works "$venv/bin/python"; then
        python=$(dmuon_find_python) || exit 1
        dmuon_check_compiler
        [ ! -e "$venv/pyvenv.cfg" ] || dmuon_say "$venv is broken or unfinished; making it anew"
        touch "$unfinished" "$ours"
        rm -f "$stamp"
        # everything but our own marks and the lock that is being held
        find "$venv" -mindepth 1 -maxdepth 1 ! -name 'dmuon-*' -exec rm -rf {} +
        dmuon_say "creating the environment $venv with $python"
        "$python" -m venv "$venv" >&2 ||
            dmuon_fail "$python -m venv failed; on Debian and Ubuntu install python3-venv"
    fi

    if [ "$(sed -n 1p "$stamp" 2>/dev/null)" != "$sources" ]; then
        dmuon_check_compiler
        touch "$unfinished"
        rm -f "$stamp"
        dmuon_say "installing dmuon-megatron with PyTorch, Megatron and the test tools;" \
            "the first time takes some minutes and 6 GB"
        # with setuptools in place nothing is downloaded when all requirements are met already
        "${pip[@]}" 'setuptools>=77' >&2 &&
            "${pip[@]}" --no-build-isolation --editable \
                "$DMUON_ROOT[train,plot,test,bench]" >&2 ||
            dmuon_fail "pip could not install the requirements (see above); run this again"
    elif [ "$(sed -n 2p "$stamp")" != "$DMUON_ROOT" ]; then
        dmuon_say "pointing the environment $venv at $DMUON_ROOT"
        rm -f "$stamp"
        "${pip[@]}" --no-build-isolation --no-deps --editable "$DMUON_ROOT" >&2 ||
            dmuon_fail "pip could not install $DMUON_ROOT (see above)"
    else
        return 0
    fi
    printf '%s\n%s\n' "$sources" "$DMUON_ROOT" >"$stamp"
    rm -f "$unfinished"
    dmuon_say "the environment $venv is ready"
}

dmuon_set_up() {
    local venv=${DMUON_VENV:-.venv}
    case $venv in
        /*) ;;
        *) venv=$DMUON_ROOT/$venv ;;
    esac
    if [ -d "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ ! -e "$venv/dmuon-ours" ] &&
        ls -A "$venv" | grep -qv '^dmuon-'; then
        dmuon_fail "DMUON_VENV=$venv is a folder with something else in it; name another one"
    fi
    mkdir -p "$venv" || dmuon_fail "cannot create $venv; set DMUON_VENV to another folder"
    if command -v flock >/dev/null; then
        (
            flock --nonblock 9 || { dmuon_say "waiting for another set-up of $venv"; flock 9; }
            dmuon_install "$venv" 9>&-
        ) 9>"$venv/dmuon-lock" || exit 1
    else
        (dmuon_install "$venv") || exit 1
    fi
    DMUON_PYTHON=$venv/bin/python
}

dmuon_set_up

# One thread a rank: both commands start up to 4 ranks on what may be 2 cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# gloo otherwise resolves the host's name, which fails where it has none.
if [ -e /sys/class/net/lo ]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
fi
# Every rank imports torch and Megatron; without .pyc files that takes a minute each time.
unset PYTHONDONTWRITEBYTECODE
