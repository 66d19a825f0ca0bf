#include "text.h"

#include <charconv>
#include <cmath>
#include <cstdlib>

namespace trtllm_mla {

std::string to_text(double value) {
    if (std::isnan(value)) {
        return "nan";
    }
    if (std::isinf(value)) {
        return value < 0 ? "-inf" : "inf";
    }
    // Digits and exponent: -d.ddde+xx
    char buffer[64];
    const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
    const std::string scientific(buffer, end);
    const std::size_t mark = scientific.find('e');
    const std::string sign = scientific[0] == '-' ? "-" : "";
    const int exponent = std::atoi(scientific.c_str() + mark + 1);
    std::string digits;
    for (const char c : scientific.substr(sign.size(), mark - sign.size())) {
        if (c != '.') {
            digits += c;
        }
    }
    if (exponent < -4 || exponent >= 16) {
        return scientific;
    }
    if (exponent < 0) {
        return sign + "0." + std::string(static_cast<std::size_t>(-exponent - 1), '0') + digits;
    }
    const std::size_t whole = static_cast<std::size_t>(exponent) + 1;
    if (digits.size() <= whole) {
        return sign + digits + std::string(whole - digits.size(), '0') + ".0";
    }
    return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

std::string tuple_text(const std::vector<std::string> &items) {
    std::string result = "(";
    for (std::size_t i = 0; i < items.size(); ++i) {
        result += (i ? ", " : "") + items[i];
    }
    return result + (items.size() == 1 ? ",)" : ")");
}

std::string any_of_text(const std::vector<std::string> &items) {
    std::string result;
    for (std::size_t i = 0; i < items.size(); ++i) {
        result += (i == 0 ? "" : i + 1 == items.size() ? " or " : ", ") + items[i];
    }
    return result;
}

} // namespace trtllm_mla
