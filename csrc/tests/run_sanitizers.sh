#!/bin/sh
# Builds the engine's own tests under ThreadSanitizer, and under AddressSanitizer with UndefinedBehaviorSanitizer, and runs
# them. Arguments: which of `thread` and `address` (both by default). CXX and CC name the compilers.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=${BUILD_DIR:-$root/build/sanitizers}
mkdir -p "$build"

# setarch: the sanitizers want their memory layout, which newer kernels randomise too widely for them.
fixed_layout="setarch $(uname -m) -R"
$fixed_layout true 2>/dev/null || fixed_layout=""

for sanitizer in ${*:-thread address}; do
    case $sanitizer in
        thread) flags="-fsanitize=thread" ;;
        address) flags="-fsanitize=address,undefined -fno-sanitize-recover=all" ;;
        *) echo "unknown sanitizer: $sanitizer" >&2; exit 2 ;;
    esac
    echo "== $sanitizer"
    ${CC:-cc} -O1 -g $flags -shared -fPIC -pthread -o "$build/libcuda-$sanitizer.so" "$root/tests/engine/stand_in_cuda.c"
    objects=$build/$sanitizer
    mkdir -p "$objects"
    rm -f "$objects"/*.o
    ls "$root"/csrc/*.cc "$here"/*.cc | grep -v -e /bindings.cc -e /tensor_pickling.cc |
        xargs -P "$(nproc)" -I{} sh -c \
            '${CXX:-c++} -std=c++17 -O1 -g -Wall -Wextra -pthread $1 -c "$3" -o "$2/$(basename "$3").o"' - "$flags" "$objects" {}
    # shellcheck disable=SC2086
    ${CXX:-c++} $flags -pthread -o "$build/tests-$sanitizer" "$objects"/*.o -ldl
    CKPT_TEST_DIR=$build CKPT_TEST_CUDA="$build/libcuda-$sanitizer.so" TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" \
        $fixed_layout "$build/tests-$sanitizer"
done
