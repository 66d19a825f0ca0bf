// What makes the plugins of an operation.
#ifndef TRTLLM_MLA_TENSORRT_CREATOR_H
#define TRTLLM_MLA_TENSORRT_CREATOR_H

#include <vector>

#include <NvInferRuntime.h>

#include "plugin.h"

namespace trtllm_mla {

// Makes plugins from ONNX nodes and from serialised engines.
class Creator final : public nvinfer1::IPluginCreatorV3One {
public:
    Creator(const tmla_library &library, const tmla_op &op);

    nvinfer1::IPluginV3 *createPlugin(nvinfer1::AsciiChar const *name, nvinfer1::PluginFieldCollection const *fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override;
    // What the ONNX parser reads from a node.
    nvinfer1::PluginFieldCollection const *getFieldNames() noexcept override { return &field_names_; }
    nvinfer1::AsciiChar const *getPluginName() const noexcept override { return op_.name; }
    nvinfer1::AsciiChar const *getPluginVersion() const noexcept override { return kVERSION; }
    nvinfer1::AsciiChar const *getPluginNamespace() const noexcept override { return kNAMESPACE; }

private:
    const tmla_library &library_;
    const tmla_op &op_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection field_names_;
};

} // namespace trtllm_mla

#endif
