// Named arrays of a plugin: those of an ONNX node, or of a serialised engine.
#ifndef TRTLLM_MLA_TENSORRT_FIELDS_H
#define TRTLLM_MLA_TENSORRT_FIELDS_H

#include <cstdint>
#include <string>
#include <vector>

#include <NvInferRuntime.h>

#include "trtllm_mla/plan.h"

namespace trtllm_mla {

// Names of the fields of a serialised plugin beside the operation's attributes; trtllm_mla/engine/plugin.py has the
// same.
constexpr const char *kMODEL_DTYPE = "model_dtype";
constexpr const char *kCACHE_DTYPE = "cache_dtype";
constexpr const char *kTILES = "tiles";
constexpr const char *kWORKSPACE = "workspace_bytes";

// What the engine is, beside a plugin's attributes.
struct Settings {
    std::string model_dtype; // bfloat16
    std::string cache_dtype; // nvfp4
    std::vector<int32_t> tiles; // for each target: compute capability, tile_s, num_stages
};

// Reads fields. All functions throw Error where a field is missing, or is of another type or length.
class FieldReader {
public:
    // collection: may be null; it must outlive this object.
    explicit FieldReader(const nvinfer1::PluginFieldCollection *collection) : collection_(collection) {}

    // Value of each attribute of an operation.
    std::vector<tmla_value> attributes(const tmla_op &op) const;
    int64_t integer(const char *name) const;
    double real(const char *name) const;
    std::string text(const char *name) const;
    std::vector<int32_t> integers(const char *name) const;

private:
    const nvinfer1::PluginField &find(const char *name) const;
    const nvinfer1::PluginField &scalar(const char *name) const;

    const nvinfer1::PluginFieldCollection *collection_;
};

// The fields of a serialised plugin, and the memory that they point to.
class SerializedFields {
public:
    SerializedFields(const tmla_op &op, const std::vector<tmla_value> &attributes, const Settings &settings,
                     int64_t workspace_bytes);
    SerializedFields(const SerializedFields &) = delete;
    SerializedFields &operator=(const SerializedFields &) = delete;

    const nvinfer1::PluginFieldCollection &collection() const { return collection_; }

private:
    Settings settings_;
    int64_t workspace_bytes_;
    std::vector<int32_t> integers_; // as many as there are attributes, as is reals_
    std::vector<float> reals_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_;
};

} // namespace trtllm_mla

#endif
