// Reads library data, of which nothing is trusted.
#ifndef TRTLLM_MLA_READER_H
#define TRTLLM_MLA_READER_H

#include <cstddef>
#include <cstdint>
#include <string>

namespace trtllm_mla {

// Reads the bytes of library data one value after the other. Whole numbers are in LEB128: seven bits a byte, the
// lowest first, the top bit set in all bytes but the last. Throws Error where the data ends or is out of range.
class Reader {
public:
    Reader(const void *data, uint64_t size)
        : next_(static_cast<const unsigned char *>(data)), end_(next_ + size), begin_(next_) {}

    uint64_t unsigned_int();
    // A number below 2^31.
    int32_t small_int();
    // A number below `limit`.
    uint32_t index(std::size_t limit);
    // How many items follow. Each takes at least a byte, so that there cannot be more than bytes.
    uint32_t count();
    // Zigzag: 0, -1, 1, -2, ... are 0, 1, 2, 3, ...
    int64_t signed_int();
    // An IEEE double, lowest byte first.
    double real();
    std::string text();
    // `size` bytes that stay where they are.
    const unsigned char *bytes(uint64_t size);
    bool at_end() const { return next_ == end_; }

private:
    [[noreturn]] void fail(const std::string &problem) const;
    uint64_t remaining() const { return static_cast<uint64_t>(end_ - next_); }

    const unsigned char *next_;
    const unsigned char *end_;
    const unsigned char *begin_;
};

} // namespace trtllm_mla

#endif
