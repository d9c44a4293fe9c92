#pragma once

#include <string>
#include <utility>

namespace ckpt {

// The outcome of an operation: success, or what was tried, on what, and why it did not work.
//
// A value, never thrown: it crosses threads and ends in a ticket, where a person reads it as "write /x/y: No
// space left on device". Copyable; cheap when ok.
class Status {
 public:
  Status() = default;

  // `error` is a positive errno, or 0 where no system call failed. An empty `text` means: what the system
  // says of `error`.
  static Status Error(std::string operation, std::string path, int error, std::string text = {});

  bool ok() const { return operation_.empty(); }
  const std::string& operation() const { return operation_; }
  const std::string& path() const { return path_; }
  int error() const { return error_; }
  const std::string& text() const { return text_; }

 private:
  std::string operation_;
  std::string path_;
  std::string text_;
  int error_ = 0;
};

}  // namespace ckpt
