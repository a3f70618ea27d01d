#!/bin/sh
# Makes the environment of the tests with torch and JAX: sh tests/torch/install.sh FOLDER PYTHON
#
# With ALLRANKS_TEST_TORCH=/path/to/python it uses that Python and its torch. Else it chooses PYTHON, or another
# Python that is found, for which pip finds torch built for CPUs. The ordinary build for Linux on x86_64
# brings gigabytes of CUDA: it is installed where there is none for CPUs, and room enough. Never fails
# for want of torch: these tests are then skipped, and say what to type.

folder=$1
python=$2
wanted=tests/torch/requirements.txt
torch=$(sed -n 's/^\(torch==[^;]*\).*/\1/p' "$wanted")
ordinary_gb=14

# The first Python for which pip finds this version of torch.
first_with() {
    "$python" tests/pythons.py --list "$python" | while read -r candidate; do
        "$python" -m pip --disable-pip-version-check --python "$candidate" index versions torch 2>/dev/null |
            tr -s ' ,' '\n' | grep -Fqx "${1#torch==}" && echo "$candidate" && break
    done
}

why="pip finds no $torch for any Python that is found"
if [ -n "$ALLRANKS_TEST_TORCH" ]; then
    chosen=$ALLRANKS_TEST_TORCH
    there=$("$chosen" -c 'import torch; print(torch.__path__[0])') || exit 0
    found="the torch of this Python"
elif [ "$(uname -sm)" = 'Linux x86_64' ]; then
    found=$torch+cpu
    chosen=$(first_with "$found")
    free_gb=$(df -Pk "$(dirname "$folder")" | awk 'NR == 2 { printf "%d", $4 / 1e6 }')
    if [ -z "$chosen" ] && [ "$free_gb" -lt $ordinary_gb ]; then
        why="pip finds no $found, and $torch needs $ordinary_gb GB of free space, found $free_gb GB"
    elif [ -z "$chosen" ]; then
        found=$torch
        chosen=$(first_with "$found")
    fi
else
    found=$torch
    chosen=$(first_with "$found")
fi
if [ -z "$chosen" ]; then
    echo "The tests with torch and JAX will be skipped: $why."
    exit 0
fi
echo "The tests with torch and JAX use $found: $("$chosen" --version) ($chosen)."

echo "Installing what $wanted lists into $folder."
set -e
rm -rf "$folder"
"$chosen" -m venv "$folder"
if [ -n "$there" ]; then
    # A path file, not --system-site-packages, which would not show what another environment has.
    place=$("$folder/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    dirname "$there" >"$place/torch_of_another_python.pth"
    sed '/^torch==/d' "$wanted" >"$folder/requirements.txt"
    wanted=$folder/requirements.txt
fi
# The ordinary build names its own versions of CUDA's libraries; those of the project are for cupy.
grep -Ev '^(nvidia|cuda)-' constraints.txt >"$folder/constraints.txt"
"$folder/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile \
    --constraint "$folder/constraints.txt" --constraint tests/torch/constraints.txt --requirement "$wanted" --editable .
touch "$folder/.made"
