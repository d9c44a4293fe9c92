#include "status.h"

#include <system_error>

namespace ckpt {

Status Status::Error(std::string operation, std::string path, int error, std::string text) {
  Status status;
  status.operation_ = std::move(operation);
  status.path_ = std::move(path);
  status.error_ = error;
  status.text_ = text.empty() ? std::generic_category().message(error) : std::move(text);
  return status;
}

}  // namespace ckpt
