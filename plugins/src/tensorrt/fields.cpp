#include "fields.h"

#include <cstring>
#include <limits>

#include "error.h"

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

namespace trtllm_mla {
namespace {

// Fields that TensorRT hands over need not be aligned.
template <typename T> T read(const PluginField &field, int32_t index = 0) {
    T value;
    std::memcpy(&value, static_cast<const char *>(field.data) + sizeof(T) * static_cast<std::size_t>(index), sizeof(T));
    return value;
}

Error wrong_type(const PluginField &field, const char *expected) {
    return Error("field '" + std::string(field.name) + "': found a field of type " +
                 std::to_string(static_cast<int32_t>(field.type)) + ", expected " + expected);
}

} // namespace

std::vector<tmla_value> FieldReader::attributes(const tmla_op &op) const {
    std::vector<tmla_value> values(static_cast<std::size_t>(op.num_attributes));
    for (int32_t i = 0; i < op.num_attributes; ++i) {
        const tmla_attribute &attribute = op.attributes[i];
        tmla_value &value = values[static_cast<std::size_t>(i)];
        if (attribute.type == TMLA_ATTRIBUTE_INT) {
            value.integer = integer(attribute.name);
        } else {
            value.real = real(attribute.name);
        }
    }
    return values;
}

int64_t FieldReader::integer(const char *name) const {
    const PluginField &field = scalar(name);
    switch (field.type) {
    case PluginFieldType::kINT32:
        return read<int32_t>(field);
    case PluginFieldType::kINT64:
        return read<int64_t>(field);
    default:
        throw wrong_type(field, "whole numbers of 32 or 64 bits");
    }
}

double FieldReader::real(const char *name) const {
    const PluginField &field = scalar(name);
    if (field.type != PluginFieldType::kFLOAT32) {
        throw wrong_type(field, "numbers of type float");
    }
    return static_cast<double>(read<float>(field));
}

std::string FieldReader::text(const char *name) const {
    const PluginField &field = find(name);
    if (field.type != PluginFieldType::kCHAR) {
        throw wrong_type(field, "characters");
    }
    return std::string(static_cast<const char *>(field.data), static_cast<std::size_t>(field.length));
}

std::vector<int32_t> FieldReader::integers(const char *name) const {
    const PluginField &field = find(name);
    if (field.type != PluginFieldType::kINT32) {
        throw wrong_type(field, "whole numbers of 32 bits");
    }
    std::vector<int32_t> values;
    for (int32_t i = 0; i < field.length; ++i) {
        values.push_back(read<int32_t>(field, i));
    }
    return values;
}

const PluginField &FieldReader::find(const char *name) const {
    const bool readable = collection_ != nullptr && collection_->fields != nullptr;
    std::string found;
    for (int32_t i = 0; readable && i < collection_->nbFields; ++i) {
        const PluginField &field = collection_->fields[i];
        if (field.name == nullptr) {
            continue;
        }
        if (std::strcmp(field.name, name) == 0) {
            if (field.length < 0 || (field.data == nullptr && field.length > 0)) {
                throw Error("field '" + std::string(name) + "': found no data");
            }
            return field;
        }
        found += (found.empty() ? "" : ", ") + std::string(field.name);
    }
    throw Error("field '" + std::string(name) + "' is missing; found " + (found.empty() ? "none" : found));
}

const PluginField &FieldReader::scalar(const char *name) const {
    const PluginField &field = find(name);
    if (field.length != 1) {
        throw Error("field '" + std::string(name) + "': found " + std::to_string(field.length) +
                    " values, expected one");
    }
    return field;
}

SerializedFields::SerializedFields(const tmla_op &op, const std::vector<tmla_value> &attributes,
                                   const Settings &settings, int64_t workspace_bytes)
    : settings_(settings), workspace_bytes_(workspace_bytes), integers_(attributes.size()), reals_(attributes.size()) {
    for (std::size_t i = 0; i < attributes.size(); ++i) {
        const tmla_attribute &attribute = op.attributes[i];
        if (attribute.type == TMLA_ATTRIBUTE_INT) {
            if (attributes[i].integer < std::numeric_limits<int32_t>::min() ||
                attributes[i].integer > std::numeric_limits<int32_t>::max()) {
                throw Error("attribute '" + std::string(attribute.name) + "': found " +
                            std::to_string(attributes[i].integer) + ", expected a number of 32 bits");
            }
            integers_[i] = static_cast<int32_t>(attributes[i].integer);
            fields_.emplace_back(attribute.name, &integers_[i], PluginFieldType::kINT32, 1);
        } else {
            reals_[i] = static_cast<float>(attributes[i].real);
            fields_.emplace_back(attribute.name, &reals_[i], PluginFieldType::kFLOAT32, 1);
        }
    }
    const auto add_text = [this](const char *name, const std::string &text) {
        fields_.emplace_back(name, text.data(), PluginFieldType::kCHAR, static_cast<int32_t>(text.size()));
    };
    add_text(kMODEL_DTYPE, settings_.model_dtype);
    add_text(kCACHE_DTYPE, settings_.cache_dtype);
    fields_.emplace_back(kTILES, settings_.tiles.data(), PluginFieldType::kINT32,
                         static_cast<int32_t>(settings_.tiles.size()));
    fields_.emplace_back(kWORKSPACE, &workspace_bytes_, PluginFieldType::kINT64, 1);
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
}

} // namespace trtllm_mla
