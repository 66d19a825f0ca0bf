// The TensorRT libraries that are in the process. This library links to none of them.
//
// Plugins and creators have one binary layout from TensorRT 10.13 on. Registries, loggers and logger finders have not:
// those of TensorRT 11, and of TensorRT-RTX from 1.7 on, differ from those of TensorRT 10, and a call through the
// headers of one to an object of the other goes astray. So only libraries whose layout the headers have are called.
#ifndef TRTLLM_MLA_TENSORRT_LOADED_TENSORRT_H
#define TRTLLM_MLA_TENSORRT_LOADED_TENSORRT_H

#include <string>
#include <vector>

#include <NvInferRuntime.h>

namespace trtllm_mla {

struct TensorRT {
    nvinfer1::IPluginRegistry *registry;
    nvinfer1::ILogger *logger; // null until a builder or runtime is made
};

struct LoadedTensorRT {
    std::vector<TensorRT> callable;
    std::vector<std::string> other_layout; // names of those that are not
    bool builds_for_other_gpus = false;    // TensorRT-RTX does; TensorRT builds for the GPU at hand
};

// Those that are loaded now; loads none.
LoadedTensorRT loaded_tensorrt();

} // namespace trtllm_mla

#endif
