// How the bindings, of the CPU and of the CUDA kernels, refuse arguments: a Python ValueError with one line of
// text. It is put together without iostreams: where a compiler links its own copy of libstdc++ into the
// extension, formatting a number through torch's streams crashes.
#pragma once
#include <torch/extension.h>

#include <string>

namespace decodev2 {

inline void append(std::string& text, const char* part) { text += part; }
inline void append(std::string& text, const std::string& part) { text += part; }
inline void append(std::string& text, int64_t part) { text += std::to_string(part); }
inline void append(std::string& text, int part) { text += std::to_string(part); }
inline void append(std::string& text, size_t part) { text += std::to_string(part); }
inline void append(std::string& text, torch::ScalarType part) { text += c10::toString(part); }
inline void append(std::string& text, const torch::Device& part) { text += part.str(); }
inline void append(std::string& text, torch::IntArrayRef part) {
  text += '[';
  for (size_t i = 0; i < part.size(); ++i) text += (i ? ", " : "") + std::to_string(part[i]);
  text += ']';
}

template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw pybind11::value_error(text_of(parts...));
}

}  // namespace decodev2

#define DECODEV2_CHECK(condition, ...)                 \
  do {                                                 \
    if (!(condition)) ::decodev2::refuse(__VA_ARGS__); \
  } while (false)
