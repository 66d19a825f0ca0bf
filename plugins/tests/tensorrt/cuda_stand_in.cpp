// A CUDA driver that records what it is told, and runs nothing.
//
// A launch's parameters are read as the GPU would: the cubin says how many there are, and how many bytes each has.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <elf.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int32_t kSUCCESS = 0;
constexpr int32_t kINVALID_VALUE = 1;
constexpr int32_t kINVALID_IMAGE = 200;
constexpr int32_t kNOT_FOUND = 500;

// Of .nv.info sections: an attribute of some bytes, and the one that describes a parameter.
constexpr unsigned char kSIZED_VALUE = 0x04;
constexpr unsigned char kPARAMETER_INFO = 0x17;
constexpr unsigned kPARAMETER_SIZE_SHIFT = 18;

struct Module {
    std::vector<unsigned char> image;
    uint64_t digest; // FNV-1a
    uint64_t context;
};

struct Function {
    const Module *module;
    std::string entry;
    std::vector<uint32_t> parameter_sizes;
    int32_t max_dynamic_shared_bytes = 0;
};

struct State {
    std::mutex mutex;
    uint64_t context = 1; // 0 where the thread has none
    int32_t compute_capability = 89;
    int32_t multiprocessors = 128;
    std::string failing_function;
    int32_t failure = kSUCCESS;
    std::string log;
};

State &state() {
    static State &state = *new State();
    return state;
}

void record(const std::string &line) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().log += line + "\n";
}

int32_t result(const char *function) { return state().failing_function == function ? state().failure : kSUCCESS; }

template <typename T> T at(const unsigned char *image, uint64_t offset) {
    T value;
    std::memcpy(&value, image + offset, sizeof(T));
    return value;
}

uint64_t elf_size(const unsigned char *image) {
    const auto header = at<Elf64_Ehdr>(image, 0);
    uint64_t size = std::max<uint64_t>(header.e_shoff + uint64_t{header.e_shnum} * header.e_shentsize,
                                       header.e_phoff + uint64_t{header.e_phnum} * header.e_phentsize);
    for (unsigned i = 0; i < header.e_shnum; ++i) {
        const auto section = at<Elf64_Shdr>(image, header.e_shoff + uint64_t{i} * header.e_shentsize);
        if (section.sh_type != SHT_NOBITS) {
            size = std::max<uint64_t>(size, section.sh_offset + section.sh_size);
        }
    }
    return size;
}

// Bytes of each parameter of a kernel; false where the cubin has no such kernel.
bool read_parameter_sizes(const Module &module, const std::string &entry, std::vector<uint32_t> &sizes) {
    const unsigned char *const image = module.image.data();
    const auto header = at<Elf64_Ehdr>(image, 0);
    const auto section = [&](unsigned index) {
        return at<Elf64_Shdr>(image, header.e_shoff + uint64_t{index} * header.e_shentsize);
    };
    const uint64_t names = section(header.e_shstrndx).sh_offset;
    std::map<uint32_t, uint32_t> by_ordinal;
    for (unsigned i = 0; i < header.e_shnum; ++i) {
        const Elf64_Shdr info = section(i);
        if (".nv.info." + entry != reinterpret_cast<const char *>(image + names + info.sh_name)) {
            continue;
        }
        for (uint64_t offset = info.sh_offset; offset < info.sh_offset + info.sh_size;) {
            const bool has_value = image[offset] == kSIZED_VALUE;
            const uint64_t size = has_value ? at<uint16_t>(image, offset + 2) : 0;
            if (has_value && image[offset + 1] == kPARAMETER_INFO) {
                by_ordinal[at<uint16_t>(image, offset + 8)] = at<uint32_t>(image, offset + 12) >> kPARAMETER_SIZE_SHIFT;
            }
            offset += 4 + size;
        }
        for (const auto &[ordinal, size] : by_ordinal) {
            sizes.push_back(size);
        }
        return true;
    }
    return false;
}

std::string hex(const void *data, std::size_t size) {
    std::string text;
    for (std::size_t i = 0; i < size; ++i) {
        char byte[3];
        std::snprintf(byte, sizeof(byte), "%02x", static_cast<const unsigned char *>(data)[i]);
        text += byte;
    }
    return text;
}

} // namespace

// What a test says and asks.

EXPORT void stand_in_set_device(uint64_t context, int32_t compute_capability, int32_t multiprocessors) {
    state().context = context;
    state().compute_capability = compute_capability;
    state().multiprocessors = multiprocessors;
}

// From now on, a function reports a code.
EXPORT void stand_in_fail(const char *function, int32_t code) {
    state().failing_function = function;
    state().failure = code;
}

// What was recorded since the last call, a line for each.
EXPORT const char *stand_in_take_log() {
    static std::string &taken = *new std::string();
    const std::lock_guard<std::mutex> lock(state().mutex);
    taken.swap(state().log);
    state().log.clear();
    return taken.c_str();
}

// The driver.

EXPORT int32_t cuCtxGetCurrent(void **context) {
    *context = reinterpret_cast<void *>(state().context);
    return result("cuCtxGetCurrent");
}

EXPORT int32_t cuCtxGetId(void *context, unsigned long long *id) {
    *id = 1000 + reinterpret_cast<uintptr_t>(context);
    return result("cuCtxGetId");
}

EXPORT int32_t cuCtxGetDevice(int32_t *device) {
    *device = 3;
    return result("cuCtxGetDevice");
}

EXPORT int32_t cuDeviceGetAttribute(int32_t *value, int32_t attribute, int32_t device) {
    const std::map<int32_t, int32_t> values = {{16, state().multiprocessors},
                                               {75, state().compute_capability / 10},
                                               {76, state().compute_capability % 10}};
    const auto found = values.find(attribute);
    if (device != 3 || found == values.end()) {
        return kINVALID_VALUE;
    }
    *value = found->second;
    return result("cuDeviceGetAttribute");
}

EXPORT int32_t cuModuleLoadData(void **module, const void *image) {
    const auto *const bytes = static_cast<const unsigned char *>(image);
    if (std::memcmp(bytes, ELFMAG, SELFMAG) != 0 || reinterpret_cast<uintptr_t>(image) % 8 != 0) {
        return kINVALID_IMAGE;
    }
    auto &loaded = *new Module{{bytes, bytes + elf_size(bytes)}, 14695981039346656037U, state().context};
    for (const unsigned char byte : loaded.image) {
        loaded.digest = (loaded.digest ^ byte) * 1099511628211U;
    }
    *module = &loaded;
    record("load " + hex(&loaded.digest, 8) + " " + std::to_string(loaded.image.size()));
    return result("cuModuleLoadData");
}

EXPORT int32_t cuModuleGetFunction(void **function, void *module, const char *entry) {
    auto &found = *new Function{static_cast<const Module *>(module), entry, {}};
    if (!read_parameter_sizes(*found.module, entry, found.parameter_sizes)) {
        return kNOT_FOUND;
    }
    *function = &found;
    return result("cuModuleGetFunction");
}

EXPORT int32_t cuFuncSetAttribute(void *function, int32_t attribute, int32_t value) {
    if (attribute != 8) {
        return kINVALID_VALUE;
    }
    static_cast<Function *>(function)->max_dynamic_shared_bytes = value;
    return result("cuFuncSetAttribute");
}

EXPORT int32_t cuLaunchKernel(void *function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                              uint32_t block_y, uint32_t block_z, uint32_t shared_bytes, void *stream,
                              void **parameters, void **extra) {
    const auto &launched = *static_cast<const Function *>(function);
    const auto most_shared_bytes = static_cast<uint32_t>(std::max(launched.max_dynamic_shared_bytes, 48 * 1024));
    if (extra != nullptr || launched.module->context != state().context || shared_bytes > most_shared_bytes) {
        return kINVALID_VALUE;
    }
    std::string line = "launch " + hex(&launched.module->digest, 8) + " " + launched.entry;
    for (const uint32_t number : {grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes}) {
        line += " " + std::to_string(number);
    }
    line += " " + std::to_string(reinterpret_cast<uintptr_t>(stream));
    for (std::size_t i = 0; i < launched.parameter_sizes.size(); ++i) {
        line += " " + hex(parameters[i], launched.parameter_sizes[i]);
    }
    record(line);
    return result("cuLaunchKernel");
}

EXPORT int32_t cuGetErrorName(int32_t code, const char **name) {
    *name = code == kINVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : nullptr;
    return *name != nullptr ? kSUCCESS : kINVALID_VALUE;
}
