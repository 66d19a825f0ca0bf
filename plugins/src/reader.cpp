#include "reader.h"

#include <cstring>

#include "error.h"

namespace trtllm_mla {

void Reader::fail(const std::string &problem) const {
    throw Error("library data: at byte " + std::to_string(next_ - begin_) + ": " + problem);
}

uint64_t Reader::unsigned_int() {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        if (next_ == end_) {
            fail("the data ends, expected a number");
        }
        const uint64_t byte = *next_++;
        if (shift == 63 && byte > 1) {
            fail("found a number of more than 64 bits");
        }
        value |= (byte & 0x7F) << shift;
        if (byte < 0x80) {
            return value;
        }
    }
    fail("found a number of more than 64 bits");
}

int32_t Reader::small_int() {
    return static_cast<int32_t>(index(std::size_t{1} << 31));
}

uint32_t Reader::index(std::size_t limit) {
    const uint64_t value = unsigned_int();
    if (value >= limit) {
        fail("found " + std::to_string(value) + ", expected less than " + std::to_string(limit));
    }
    return static_cast<uint32_t>(value);
}

uint32_t Reader::count() {
    const uint64_t value = unsigned_int();
    if (value > remaining() || value >= (uint64_t{1} << 31)) {
        fail("found " + std::to_string(value) + " items, expected at most as many as the bytes that follow");
    }
    return static_cast<uint32_t>(value);
}

int64_t Reader::signed_int() {
    const uint64_t value = unsigned_int();
    const uint64_t magnitude = value >> 1;
    return (value & 1) ? -static_cast<int64_t>(magnitude) - 1 : static_cast<int64_t>(magnitude);
}

double Reader::real() {
    uint64_t bits = 0;
    const unsigned char *data = bytes(sizeof(bits));
    for (unsigned i = 0; i < sizeof(bits); ++i) {
        bits |= static_cast<uint64_t>(data[i]) << (8 * i);
    }
    double value = 0;
    static_assert(sizeof(value) == sizeof(bits), "doubles have 64 bits");
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

std::string Reader::text() {
    const uint32_t size = count();
    const unsigned char *data = bytes(size);
    if (std::memchr(data, 0, size) != nullptr) {
        fail("found a text with a zero byte");
    }
    return std::string(reinterpret_cast<const char *>(data), size);
}

const unsigned char *Reader::bytes(uint64_t size) {
    if (size > remaining()) {
        fail("found " + std::to_string(remaining()) + " bytes, expected " + std::to_string(size) + " more");
    }
    const unsigned char *data = next_;
    next_ += size;
    return data;
}

} // namespace trtllm_mla
