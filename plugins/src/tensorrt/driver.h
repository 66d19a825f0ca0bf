// The CUDA driver, opened when first needed: this library loads on machines without a GPU.
#ifndef TRTLLM_MLA_TENSORRT_DRIVER_H
#define TRTLLM_MLA_TENSORRT_DRIVER_H

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "trtllm_mla/plan.h"

// The driver's types, as cuda.h has them; not all packages of CUDA's headers have cuda.h.
struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;

namespace trtllm_mla {

using CudaContext = CUctx_st *;
using CudaModule = CUmod_st *;
using CudaFunction = CUfunc_st *;

// The CUDA context of the calling thread, and its GPU.
struct Device {
    uint64_t context; // unique in the process, also when the memory of a former context is used again
    int32_t compute_capability; // 89 for 8.9
    int32_t multiprocessors;
};

// A kernel that is loaded in a context.
struct LoadedKernel {
    const tmla_kernel *kernel;
    CudaFunction function;
};

// Functions throw Error where the driver reports one. They may be called by several threads at once.
class Driver {
public:
    // The process's driver. Throws Error if it cannot be opened, and tries again at the next call.
    static Driver &get();

    Driver(const Driver &) = delete;
    Driver &operator=(const Driver &) = delete;

    // The GPU of the calling thread's context.
    Device current_device();
    // A kernel in the calling thread's context, which `device` is; loaded at the first call.
    LoadedKernel load(const Device &device, const tmla_kernel &kernel);
    // parameters: address of each of the kernel's, the null pointers included.
    void launch(const LoadedKernel &kernel, const uint32_t (&grid)[3], std::vector<void *> &parameters,
                cudaStream_t stream);

private:
    Driver();
    template <typename Function> void find(Function *&function, const char *name);
    int32_t device_attribute(int32_t attribute, int32_t device);
    void check(int32_t result, const std::string &call) const;

    void *library_;
    int32_t (*ctx_get_current_)(CudaContext *);
    int32_t (*ctx_get_id_)(CudaContext, unsigned long long *);
    int32_t (*ctx_get_device_)(int32_t *);
    int32_t (*device_get_attribute_)(int32_t *, int32_t, int32_t);
    int32_t (*module_load_data_)(CudaModule *, const void *);
    int32_t (*module_get_function_)(CudaFunction *, CudaModule, const char *);
    int32_t (*func_set_attribute_)(CudaFunction, int32_t, int32_t);
    int32_t (*launch_kernel_)(CudaFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                              cudaStream_t, void **, void **);
    int32_t (*get_error_name_)(int32_t, const char **);

    std::mutex mutex_;
    std::map<uint64_t, Device> devices_; // by context
    std::map<uint64_t, std::map<const tmla_kernel *, CudaFunction>> functions_;
};

} // namespace trtllm_mla

#endif
