#pragma once

#include <memory>

#include "env.h"

namespace ckpt {

// A ring over io_uring, or null where the kernel, its headers at build time, or a sandbox has none.
std::unique_ptr<Ring> NewUring(unsigned depth);

}  // namespace ckpt
