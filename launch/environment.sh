# Makes the virtual environment that quickstart.sh and tests/run.sh use; source it from the root of the checkout.
# usage: source launch/environment.sh EXTRAS      for example: source launch/environment.sh cpu,dev
#
# VENV (default .venv) names the folder, PYTHON (default python3.11, else python3) the interpreter that makes it.
# Nothing is installed again while setup.py stays as it is.

rlflow_environment() {
    local extras=$1 venv=${VENV:-.venv} python=${PYTHON:-}
    [ -n "$python" ] || python=$(command -v python3.11 || command -v python3)
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    local stamp="$venv/.rlflow-${extras//,/-}" state
    state=$(cksum < setup.py)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$state" ]; then
        echo "installing rlflow[$extras] into $venv (a few minutes the first time)"
        # torch first and pinned: a resolver that is free to choose takes a CUDA build of several gigabytes.
        case ",$extras," in *,cpu,*) "$venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 ;; esac
        "$venv/bin/python" -m pip install -q --disable-pip-version-check -e ".[$extras]"
        # The optional image and audio packages can be built for another torch; then importing vLLM fails on them.
        "$venv/bin/python" -c "import torchvision" 2>/dev/null ||
            "$venv/bin/python" -m pip uninstall -qy torchvision torchaudio torchcodec
        echo "$state" > "$stamp"
    fi
    export PATH="$PWD/$venv/bin:$PATH"
    case $venv in /*) export PATH="$venv/bin:$PATH" ;; esac
}
rlflow_environment "$1"
