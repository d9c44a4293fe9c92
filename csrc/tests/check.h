#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

// A test is a function that CHECKs; the first broken promise ends the program with its place.

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                 \
    }                                                                                \
  } while (false)

// Defines a test and puts it on the list that main runs.
#define TEST(name)                                                     \
  static void name();                                                  \
  static const ckpt::test::Registered registered_##name(#name, &name); \
  static void name()

namespace ckpt::test {

struct Test {
  const char* name;
  void (*function)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

struct Registered {
  Registered(const char* name, void (*function)()) { Tests().push_back({name, function}); }
};

}  // namespace ckpt::test
