#include "driver.h"

#include <cstring>

#include <dlfcn.h>

#include "error.h"

namespace trtllm_mla {
namespace {

// Numbers of cuda.h.
constexpr int32_t kSUCCESS = 0;
constexpr int32_t kMULTIPROCESSOR_COUNT = 16;
constexpr int32_t kCOMPUTE_CAPABILITY_MAJOR = 75;
constexpr int32_t kCOMPUTE_CAPABILITY_MINOR = 76;
constexpr int32_t kMAX_DYNAMIC_SHARED_SIZE_BYTES = 8;

// CUDA C++ Programming Guide, "Shared Memory" of each generation: more has to be asked for.
constexpr int64_t kSHARED_BYTES_WITHOUT_OPT_IN = 48 * 1024;

constexpr const char *kNAME = "libcuda.so.1";

} // namespace

Driver &Driver::get() {
    // Never destroyed: kernels may be launched until the process ends.
    static Driver &driver = *new Driver();
    return driver;
}

Driver::Driver() : library_(dlopen(kNAME, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) {
        const char *const reason = dlerror();
        throw Error(std::string("found no CUDA driver, expected one to launch kernels: ") +
                    (reason != nullptr ? reason : kNAME));
    }
    find(ctx_get_current_, "cuCtxGetCurrent");
    find(ctx_get_id_, "cuCtxGetId");
    find(ctx_get_device_, "cuCtxGetDevice");
    find(device_get_attribute_, "cuDeviceGetAttribute");
    find(module_load_data_, "cuModuleLoadData");
    find(module_get_function_, "cuModuleGetFunction");
    find(func_set_attribute_, "cuFuncSetAttribute");
    find(launch_kernel_, "cuLaunchKernel");
    find(get_error_name_, "cuGetErrorName");
}

template <typename Function> void Driver::find(Function *&function, const char *name) {
    function = reinterpret_cast<Function *>(dlsym(library_, name));
    if (function == nullptr) {
        throw Error(std::string(kNAME) + " has no " + name + ", expected a driver of CUDA 12 or newer");
    }
}

Device Driver::current_device() {
    CudaContext context = nullptr;
    check(ctx_get_current_(&context), "cuCtxGetCurrent");
    if (context == nullptr) {
        throw Error("found no current CUDA context in this thread, expected that of the engine's GPU");
    }
    unsigned long long id = 0;
    check(ctx_get_id_(context, &id), "cuCtxGetId");
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = devices_.find(id);
    if (known != devices_.end()) {
        return known->second;
    }
    int32_t device = 0;
    check(ctx_get_device_(&device), "cuCtxGetDevice");
    const int32_t major = device_attribute(kCOMPUTE_CAPABILITY_MAJOR, device);
    const int32_t minor = device_attribute(kCOMPUTE_CAPABILITY_MINOR, device);
    const Device found{id, 10 * major + minor, device_attribute(kMULTIPROCESSOR_COUNT, device)};
    devices_.emplace(id, found);
    return found;
}

LoadedKernel Driver::load(const Device &device, const tmla_kernel &kernel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto &functions = functions_[device.context];
    const auto known = functions.find(&kernel);
    if (known != functions.end()) {
        return {&kernel, known->second};
    }
    // Modules stay until their context ends, which unloads them.
    CudaModule module = nullptr;
    CudaFunction function = nullptr;
    const std::string what = std::string(" for kernel ") + kernel.key;
    // The driver takes its own copy; it is given one at an aligned address, which the library data does not promise.
    std::vector<uint64_t> cubin((kernel.cubin_size + sizeof(uint64_t) - 1) / sizeof(uint64_t));
    std::memcpy(cubin.data(), kernel.cubin, kernel.cubin_size);
    check(module_load_data_(&module, cubin.data()), "cuModuleLoadData" + what);
    check(module_get_function_(&function, module, kernel.entry), "cuModuleGetFunction" + what);
    if (kernel.shared_bytes > kSHARED_BYTES_WITHOUT_OPT_IN) {
        const int32_t bytes = static_cast<int32_t>(kernel.shared_bytes);
        check(func_set_attribute_(function, kMAX_DYNAMIC_SHARED_SIZE_BYTES, bytes),
              "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES, " + std::to_string(bytes) + ")" + what);
    }
    functions.emplace(&kernel, function);
    return {&kernel, function};
}

void Driver::launch(const LoadedKernel &kernel, const uint32_t (&grid)[3], std::vector<void *> &parameters,
                    cudaStream_t stream) {
    const int32_t result =
        launch_kernel_(kernel.function, grid[0], grid[1], grid[2], static_cast<unsigned>(kernel.kernel->block_threads),
                       1, 1, static_cast<unsigned>(kernel.kernel->shared_bytes), stream, parameters.data(), nullptr);
    check(result, std::string("cuLaunchKernel for kernel ") + kernel.kernel->key);
}

int32_t Driver::device_attribute(int32_t attribute, int32_t device) {
    int32_t value = 0;
    check(device_get_attribute_(&value, attribute, device),
          "cuDeviceGetAttribute(" + std::to_string(attribute) + ")");
    return value;
}

void Driver::check(int32_t result, const std::string &call) const {
    if (result == kSUCCESS) {
        return;
    }
    const char *name = nullptr;
    get_error_name_(result, &name);
    throw Error(call + ": the CUDA driver reports " + (name != nullptr ? name : std::to_string(result)));
}

} // namespace trtllm_mla
