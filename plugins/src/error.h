// The exception that everything behind the C interface reports problems with; it never crosses the interface.
#ifndef TRTLLM_MLA_ERROR_H
#define TRTLLM_MLA_ERROR_H

#include <stdexcept>
#include <string>

namespace trtllm_mla {

class Error : public std::runtime_error {
public:
    explicit Error(const std::string &message) : std::runtime_error(message) {}
};

} // namespace trtllm_mla

#endif
