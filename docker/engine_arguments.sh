# Prints the CMake arguments with which an image compiles llama.cpp: nothing in it depends on the CPU that compiles.
#
# On x86-64 the CPU backend is compiled once for each generation of CPUs, from the first one to those with AMX, and ggml
# loads the best one at start (inference/worker/ggml_backends.py). Each is a library of its own, which belongs beside the other
# libraries: by default CMake would install it in a folder `bin` that nothing looks into. On arm64 the code is ARMv8's.
#
# GCC before 13 breaks the code for AMX (headgate/build.py); a base image with such a compiler gets the flags that help.
set -eu
arguments="-DGGML_RPC=ON -DGGML_NATIVE=OFF"
if [ "${1:-$(uname -m)}" = x86_64 ]; then
    arguments="$arguments -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON -DCMAKE_INSTALL_BINDIR=llama_cpp/lib"
    gcc=$("${CXX:-c++}" -dM -E -x c++ /dev/null | awk '
        $2 == "__clang__" { clang = 1 } $2 == "__GNUC__" { version = $3 } END { if (!clang) print version }')
    if [ "${gcc:-13}" -lt 13 ]; then
        arguments="$arguments -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"
    fi
fi
echo "$arguments"
