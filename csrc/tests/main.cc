#include <cstring>

#include "check.h"

// Runs all tests, or those whose name contains the first argument.
int main(int argc, char** argv) {
  int run = 0;
  for (const auto& test : ckpt::test::Tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.function();
    ++run;
  }
  std::printf("%d tests passed\n", run);
  return run > 0 ? 0 : 1;
}
