#!/bin/sh
# Makes the environment of the tests with torch and JAX: sh tests/torch/install.sh FOLDER PYTHON
#
# With ALLRANKS_TEST_TORCH=/path/to/python it uses that Python and its torch. Else it installs torch where
# pip finds the build for CPUs, because the default build for Linux on x86_64 brings gigabytes of CUDA.
# Never fails: without torch these tests are skipped, and say what to type.

folder=$1
python=${ALLRANKS_TEST_TORCH:-$2}
wanted=tests/torch/requirements.txt
torch=$(sed -n 's/^\(torch==[^;]*\).*/\1/p' "$wanted")

if [ -n "$ALLRANKS_TEST_TORCH" ]; then
    there=$("$python" -c 'import torch; print(torch.__path__[0])') || exit 0
    echo "Tests with torch use the torch of $python."
elif [ "$(uname -sm)" = 'Linux x86_64' ] && ! "$python" -m pip --disable-pip-version-check install \
    --quiet --dry-run --ignore-installed --no-deps "$torch+cpu" 2>/dev/null; then
    echo "The tests with torch will be skipped: pip finds no $torch+cpu."
    exit 0
fi

echo "Installing what $wanted lists into $folder."
set -e
rm -rf "$folder"
"$python" -m venv "$folder"
if [ -n "$there" ]; then
    # A path file, not --system-site-packages, which would not show what another environment has.
    place=$("$folder/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    dirname "$there" >"$place/torch_of_another_python.pth"
    sed '/^torch==/d' "$wanted" >"$folder/requirements.txt"
    wanted=$folder/requirements.txt
fi
"$folder/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile \
    --constraint constraints.txt --constraint tests/torch/constraints.txt --requirement "$wanted" --editable .
touch "$folder/.made"
