// Numbers and lists as Python writes them, so that messages are the same.
#ifndef TRTLLM_MLA_TEXT_H
#define TRTLLM_MLA_TEXT_H

#include <string>
#include <vector>

namespace trtllm_mla {

// The shortest decimal number that reads back as the same double: 0.1, 1e-07, 1e+16, inf, nan.
std::string to_text(double value);

// (a, b), (a,) or ().
std::string tuple_text(const std::vector<std::string> &items);

// a, b or c.
std::string any_of_text(const std::vector<std::string> &items);

} // namespace trtllm_mla

#endif
